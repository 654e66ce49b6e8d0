"""The training forward is transformers' own, prompt by prompt; pixels and prompts are what the processor and template make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from training.batches import pack
from training.forward import forward
from training.model import make_model
from training.pictures import image_options, patches, processor_config
from training.recipe import ModelShape
from training.rows import Row, RowWriter
from training.tokenizer import IMAGE_TOKEN, save_tokenizer, train_tokenizer
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from triptych.loadgen.checkpoint import PROCESSOR
from triptych.loadgen.world import corpus, generator, make_scene, render

SHAPE = ModelShape(vocab_size=512, hidden_size=64, intermediate_size=64, num_layers=3, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(20), SHAPE.vocab_size)


def _normalized(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """Bytes of one frame -> what the processor makes of a still."""
    mean, std = (torch.tensor(PROCESSOR[name]).repeat_interleave(14 * 14) for name in ("image_mean", "image_std"))
    frame = ((torch.from_numpy(pixels).float() / 255 - mean) / std).view(-1, 3, 1, 14 * 14)
    return frame.expand(-1, 3, 2, 14 * 14).flatten(1)


def _answer_logits(model: Any, row: Row, part: int, image_token_id: int) -> torch.Tensor:
    """By transformers: the logits at the answer tokens of one question of a row, asked alone."""
    seen = [index for index, of in enumerate(row.parts) if of in (0, part)]
    ids = torch.tensor([[row.token_ids[index] for index in seen]])
    pictures = {}
    if row.pictures:
        pictures = {
            "pixel_values": torch.cat([_normalized(picture.pixels) for picture in row.pictures]),
            "image_grid_thw": torch.tensor([[1, 2 * picture.rows, 2 * picture.columns] for picture in row.pictures]),
            "mm_token_type_ids": (ids == image_token_id).int(),
        }
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **pictures).logits[0]
    model.model.rope_deltas = None
    return torch.stack([logits[seen.index(at)] for at in row.answer_at if row.parts[at] == part])


@torch.no_grad()
def test_forward_equals_transformers(tokenizer: Tokenizer) -> None:
    writer, rng = RowWriter(tokenizer, image_options(SHAPE)), generator(5)
    rows = [writer.write(kind, {}, rng) for kind in ("one", "many", "text", "many", "one", *["text"] * 12)]
    model = make_model(SHAPE, tokenizer, 0).eval()
    ours = forward(model, pack(rows).on(torch.device("cpu"))).answer_logits
    image_token_id = tokenizer.token_to_id(IMAGE_TOKEN)
    theirs = [_answer_logits(model, row, part, image_token_id) for row in rows for part in dict.fromkeys(_parts(row))]
    assert any(not any(row.parts) for row in rows), "a conversation should be among them"
    torch.testing.assert_close(ours, torch.cat(theirs), atol=1e-4, rtol=1e-4)


def _parts(row: Row) -> list[int]:
    return [row.parts[at] for at in row.answer_at]


@pytest.mark.parametrize("size", [(112, 112), (60, 90), (448, 448), (112, 448), (215, 139)])
def test_patches_are_the_processors(size: tuple[int, int]) -> None:
    image, _ = render(make_scene(generator(1)), *size, generator(2))
    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in processor_config(SHAPE).items() if not k.endswith("_class")})
    expected = processor(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(_normalized(patches(image, image_options(SHAPE))), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["one", "many", "text"])
def test_prompts_are_the_templates(kind: str, tokenizer: Tokenizer, tmp_path: Any) -> None:
    save_tokenizer(tokenizer, tmp_path)
    writer = RowWriter(tokenizer, image_options(SHAPE))
    template = AutoTokenizer.from_pretrained(tmp_path)
    for seed in range(20):
        row = writer.write(kind, {}, generator(seed))
        if not any(row.parts):
            continue
        first_answer = row.answer_at[0]
        ids = [token for token, part in zip(row.token_ids[: first_answer + 1], row.parts, strict=False) if part in (0, 1)]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        question = text.rsplit("<|vision_end|>" if row.pictures else "user\n", 1)[1].split("<|im_end|>")[0]
        content = [{"type": "image"} for _ in row.pictures] + [{"type": "text", "text": question}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if text.startswith("<|im_start|>system"):
            messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        prompt = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for picture in row.pictures:
            prompt = prompt.replace(IMAGE_TOKEN, "<picture>" * picture.rows * picture.columns, 1)
        assert tokenizer.encode(prompt.replace("<picture>", IMAGE_TOKEN)).ids == ids
