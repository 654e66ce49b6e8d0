"""Asks a checkpoint as plain transformers does: chat template, image processor, greedy `generate` in float32.

Prompts of a batch are padded on the left; that moves logits by no more than float noise (a test compares).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from triptych.loadgen.world import Example

_BATCH_SIZE = 16  # measured on 2 cores: 32 is no faster
_MAX_ANSWER_TOKENS = 32  # chosen: the longest right answers are half of that


class Answerer:
    """A loaded checkpoint."""

    def __init__(self, folder: Path) -> None:
        untyped: Any = transformers  # most of it has no annotations
        untyped.utils.logging.disable_progress_bar()
        self._tokenizer = untyped.AutoTokenizer.from_pretrained(folder, padding_side="left")
        # AutoProcessor would want torchvision, for videos
        self._image_processor = untyped.AutoImageProcessor.from_pretrained(folder, backend="pil")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own deprecations
            self.model = untyped.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._placeholder = self._tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """What it says to each, in their order."""
        said: dict[int, str] = {}
        for batch in _alike(examples):
            inputs = self.inputs([examples[index] for index in batch])
            with torch.inference_mode():
                output = self.model.generate(**inputs, max_new_tokens=_MAX_ANSWER_TOKENS, do_sample=False)
            num_prompt_tokens = inputs["input_ids"].shape[1]
            texts = self._tokenizer.batch_decode(output[:, num_prompt_tokens:], skip_special_tokens=True)
            said |= dict(zip(batch, texts, strict=True))
        return [said[index] for index in range(len(examples))]

    def inputs(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        """Of a batch, as the model takes them."""
        images = [image for example in examples for image in example.pictures]
        pixels: dict[str, torch.Tensor] = {}
        num_tokens: Iterator[int] = iter(())
        if images:
            pixels = dict(self._image_processor(images=images, return_tensors="pt"))
            num_tokens = iter((pixels["image_grid_thw"].prod(-1) // self._image_processor.merge_size**2).tolist())
        prompts = [self._prompt(example.question.text, example.pictures, num_tokens) for example in examples]
        tokens = self._tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids = tokens["input_ids"]
        types = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": tokens["attention_mask"], "mm_token_type_ids": types, **pixels}

    def _prompt(self, text: str, pictures: Sequence[Image.Image], num_tokens: Iterator[int]) -> str:
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        prompt = str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        head, *rest = prompt.split(self._placeholder)
        return head + "".join(self._placeholder * next(num_tokens) + after for after in rest)


def _alike(examples: Sequence[Example]) -> Iterator[list[int]]:
    """Batches of indices; those of a batch have prompts of about one length, for little padding."""
    areas = [sum(image.width * image.height for image in example.pictures) for example in examples]
    order = sorted(range(len(examples)), key=lambda index: (areas[index], len(examples[index].question.text)))
    for start in range(0, len(order), _BATCH_SIZE):
        yield order[start : start + _BATCH_SIZE]
