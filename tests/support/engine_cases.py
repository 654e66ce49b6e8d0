"""Requests for an engine run directly, what transformers' greedy `generate` answers to them, and steps to run them.

Token equality has one excuse, float ties: where the reference's two best logits are closer than TIE_GAP, either token is
right, and what follows is a different text. (reference.py has the same for whole chat requests over HTTP.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from triptych.shared.checkpoint import Checkpoint, image_info, resized
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.torch_engine import TorchEngine
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams

MAX_TOKENS = 12
TIE_GAP = 1e-4  # float32 results move by 1e-7 to 1e-6 relative with the shape of the batch
_untyped: Any = transformers  # most of transformers has no annotations


@dataclass(frozen=True, slots=True)
class Answer:
    """Output tokens, and at each of them the gap between the two best logits."""

    token_ids: list[int]
    gaps: list[float]

    def difference(self, token_ids: Seq[int]) -> int | None:
        """Index of the first token of another greedy output (of the same length limit) that differs without an excuse."""
        for i, expected in enumerate(self.token_ids):
            if i >= len(token_ids) or token_ids[i] != expected:
                return None if self.gaps[i] < TIE_GAP else i
        return None if len(token_ids) == len(self.token_ids) else len(self.token_ids)


class Model:
    """The checkpoint in transformers' own classes."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        _untyped.utils.logging.disable_progress_bar()
        self._device = device
        self.model: Any = _untyped.Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=dtype).eval().to(device)
        self.image_processor: Any = _untyped.Qwen2VLImageProcessorPil.from_pretrained(path)
        self.image_token_id: int = self.model.config.image_token_id

    def generate(self, prompt: Seq[int], pictures: Seq[Image.Image], max_tokens: int, ignore_eos: bool = False) -> Answer:
        """Greedy answer to a prompt with all placeholders expanded. A stop token is the answer's last one."""
        input_ids = torch.tensor([list(prompt)], device=self._device)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if pictures:
            inputs |= self.image_processor(images=list(pictures), return_tensors="pt").to(self._device)
            inputs["mm_token_type_ids"] = (input_ids == self.image_token_id).int()
        if ignore_eos:
            inputs["eos_token_id"] = None
        with torch.inference_mode():
            output = self.model.generate(
                **inputs, do_sample=False, max_new_tokens=max_tokens, return_dict_in_generate=True, output_logits=True
            )
        best = torch.stack(output.logits)[:, 0].float().topk(2).values
        return Answer(output.sequences[0, input_ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist())


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what transformers answers to it."""

    prompt: list[int]
    pictures: list[Image.Image]
    offsets: list[int]
    answer: Answer


def picture_info(picture: Image.Image, checkpoint: Checkpoint) -> tuple[ImageInfo, torch.Tensor]:
    """A picture as preprocess hands it on."""
    height, width = resized(picture.height, picture.width, checkpoint.image)
    pixels = torch.from_numpy(np.array(picture.resize((width, height), Image.Resampling.BICUBIC)))
    return image_info(height, width, checkpoint.image), pixels


def random_case(seed: int, checkpoint: Checkpoint, model: Model) -> Case:
    """0 to 4 pictures of odd sizes anywhere in a text of mixed length."""
    rng = random.Random(seed)
    config = checkpoint.config
    prompt: list[int] = []
    pictures, offsets = [], []
    num_pictures = rng.choice((0, 1, 1, 2, 4))
    for i in range(num_pictures + 1):
        prompt += [rng.randrange(1000) for _ in range(rng.choice((0, 1, 7, 40, 90)) + (i == num_pictures))]
        if i < num_pictures:
            size = (rng.randrange(15, 160), rng.randrange(15, 160))
            noise = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (size[1] // 9 + 1, size[0] // 9 + 1, 3))
            pictures.append(Image.fromarray(noise.astype(np.uint8)).resize(size))
            num_tokens = picture_info(pictures[-1], checkpoint)[0].num_tokens
            offsets.append(len(prompt) + 1)
            placeholders = [checkpoint.image_token_id] * num_tokens
            prompt += [config["vision_start_token_id"], *placeholders, config["vision_end_token_id"]]
    answer = model.generate(prompt, pictures, MAX_TOKENS, ignore_eos=True)
    return Case(prompt, pictures, offsets, answer)


def new_sequence(engine: TorchEngine, checkpoint: Checkpoint, case: Case, sampling: SamplingParams) -> Sequence:
    """A prepared sequence with its images encoded, all of them in one call, and blocks for its whole length."""
    described = [picture_info(picture, checkpoint) for picture in case.pictures]
    embeddings = engine.encode([d[0] for d in described], [d[1] for d in described]) if described else []
    images = [ImageSpan(o, d[0], e) for o, d, e in zip(case.offsets, described, embeddings, strict=True)]
    sequence = Sequence(RequestId("r"), list(case.prompt), len(case.prompt), sampling, images)
    engine.prepare(sequence)
    sequence.block_table = engine.block_pool.allocate(-(-(len(case.prompt) + sampling.max_tokens) // engine.block_size))
    return sequence


def step(engine: TorchEngine, sequences: list[Sequence], max_tokens_of: dict[int, int]) -> None:
    """One pass: a chunk of each sequence (max_tokens_of: by its index, default all that is left), tokens appended."""
    chunks = []
    for i, sequence in enumerate(sequences):
        left = len(sequence.token_ids) - sequence.num_computed_tokens
        chunks.append(Chunk(sequence, min(left, max_tokens_of.get(i, left))))
    for sequence, token in zip(sequences, engine.run(chunks), strict=True):
        if token is not None:
            sequence.token_ids.append(token)


def output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def finish(engine: TorchEngine, sequences: list[Sequence]) -> None:
    while any(s.num_output_tokens < s.sampling.max_tokens for s in sequences):
        step(engine, [s for s in sequences if s.num_output_tokens < s.sampling.max_tokens], {})


def run_random_chunks(engine: TorchEngine, sequences: list[Sequence], rng: random.Random) -> None:
    """To the end: requests join at random moments, prompts go in random chunks beside others that decode."""
    waiting, running = list(sequences), list[Sequence]()
    while running or waiting:
        if waiting and (not running or rng.random() < 0.5):
            running.append(waiting.pop())
        rng.shuffle(running)
        step(engine, running, {i: rng.choice((1, 2, 13, 50, 1000)) for i in range(len(running))})
        running = [s for s in running if s.num_output_tokens < s.sampling.max_tokens]


def release(engine: TorchEngine, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        engine.block_pool.free(sequence.block_table)
    engine.block_pool.check_integrity()
    assert engine.block_pool.num_free == engine.block_pool.num_blocks
