"""The torch engine against transformers' own `generate`: greedy float32 tokens are equal however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support.engine_cases import (
    MAX_TOKENS,
    Answer,
    Case,
    Model,
    finish,
    new_sequence,
    output,
    picture_info,
    random_case,
    release,
    run_random_chunks,
    step,
)
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.engine import fused_text, weights
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.torch_engine import TorchEngine, load_engine
from triptych.shared.engine.vision import patchify
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import Settings


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Model:
    return Model(tiny_checkpoint)


def make_engine(checkpoint: Checkpoint, block_size: int = 16) -> TorchEngine:
    return load_engine(checkpoint, Settings(block_size=block_size, kv_cache_bytes=8 << 20))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> TorchEngine:
    return make_engine(checkpoint)


@pytest.fixture(scope="module")
def cases(checkpoint: Checkpoint, reference: Model) -> list[Case]:
    return [random_case(seed, checkpoint, reference) for seed in range(16)]


GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


def test_each_request_alone(engine: TorchEngine, checkpoint: Checkpoint, cases: list[Case]) -> None:
    for case in cases:
        sequence = new_sequence(engine, checkpoint, case, GREEDY)
        finish(engine, [sequence])
        assert case.answer.difference(output(sequence)) is None
        release(engine, [sequence])


@pytest.mark.parametrize(("block_size", "seed"), [(1, 0), (5, 1), (16, 2), (64, 3)])
def test_mixed_batches_of_random_chunks(checkpoint: Checkpoint, cases: list[Case], block_size: int, seed: int) -> None:
    """Requests join at random moments, prompts go in random chunks beside others that decode."""
    engine = make_engine(checkpoint, block_size)
    everything = [new_sequence(engine, checkpoint, case, GREEDY) for case in cases]
    run_random_chunks(engine, everything, random.Random(seed))
    for case, sequence in zip(cases, everything, strict=True):
        assert case.answer.difference(output(sequence)) is None
    release(engine, everything)


def test_decoding_groups_whose_sequences_leave(checkpoint: Checkpoint, cases: list[Case]) -> None:
    """One after another; those that come take their blocks."""
    engine = make_engine(checkpoint)
    for rotated in (cases, cases[5:] + cases[:5]):
        limits = [2 + i % (MAX_TOKENS - 1) for i in range(len(rotated))]
        pairs = list(zip(rotated, limits, strict=True))
        sequences = [new_sequence(engine, checkpoint, case, SamplingParams(max_tokens=limit)) for case, limit in pairs]
        finish(engine, sequences)
        for (case, limit), sequence in zip(pairs, sequences, strict=True):
            answer = Answer(case.answer.token_ids[:limit], case.answer.gaps[:limit])
            assert answer.difference(output(sequence)) is None
        release(engine, sequences)


def test_weights_that_are_packed(checkpoint: Checkpoint, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of larger models are."""
    monkeypatch.setattr(weights, "_MIN_PACKED", 0)
    test_mixed_batches_of_random_chunks(checkpoint, cases, block_size=16, seed=4)


def test_layers_that_are_not_fused(checkpoint: Checkpoint, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' modules over the same cache; the two don't take each other's blocks."""
    fused_layout = make_engine(checkpoint).kv_layout
    monkeypatch.setattr(fused_text, "can_fuse", lambda _: False)
    engine = make_engine(checkpoint)
    assert engine.kv_layout != fused_layout
    sequences = [new_sequence(engine, checkpoint, case, GREEDY) for case in cases]
    run_random_chunks(engine, sequences, random.Random(4))
    for case, sequence in zip(cases, sequences, strict=True):
        assert case.answer.difference(output(sequence)) is None
    release(engine, sequences)


def test_blocks_move_to_a_second_engine_in_mid_generation(
    engine: TorchEngine, checkpoint: Checkpoint, cases: list[Case]
) -> None:
    """The second engine gets blocks, output tokens and the position delta: neither the prompt's tokens nor its images."""
    second = make_engine(checkpoint)
    assert second.kv_layout == engine.kv_layout
    second.block_pool.allocate(7)  # other block ids than in the first
    moved = []
    for num_before, case in enumerate(cases):
        sequence = new_sequence(engine, checkpoint, case, GREEDY)
        while sequence.num_output_tokens < 1 + num_before % (MAX_TOKENS - 1):
            step(engine, [sequence], {0: 37})
        num_blocks = -(-sequence.num_computed_tokens // engine.block_size)
        shape, dtype = engine.exported_shape(num_blocks)
        blocks = engine.export_blocks(sequence.block_table[:num_blocks], torch.empty(shape, dtype=dtype))
        table = second.block_pool.allocate(len(sequence.block_table))
        second.import_blocks(blocks, table[:num_blocks])
        tokens = [0] * len(case.prompt) + output(sequence)
        arrived = Sequence(RequestId("r"), tokens, len(case.prompt), GREEDY, [], table, sequence.num_computed_tokens)
        arrived.position_delta = sequence.position_delta
        moved.append(arrived)
        release(engine, [sequence])
    finish(second, moved)
    for case, sequence in zip(cases, moved, strict=True):
        assert case.answer.difference(output(sequence)) is None


def test_seeded_sampling_is_the_same_alone_and_batched(engine: TorchEngine, checkpoint: Checkpoint, cases: list[Case]) -> None:
    def sampling(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=i)

    alone, outputs = [], []
    for i, case in enumerate(cases[:6]):
        sequence = new_sequence(engine, checkpoint, case, sampling(i))
        finish(engine, [sequence])
        outputs.append(output(sequence))
        alone.append(sequence)
    batched = [new_sequence(engine, checkpoint, case, sampling(i)) for i, case in enumerate(cases[:6])]
    for count in range(3):
        step(engine, batched, {})
        assert all(s.num_output_tokens == count + 1 for s in batched)
    finish(engine, batched)
    assert [output(s) for s in batched] == outputs
    assert any(case.answer.token_ids != tokens for case, tokens in zip(cases, outputs, strict=False))
    release(engine, alone + batched)


def test_pictures_and_their_order_change_the_answer(engine: TorchEngine, checkpoint: Checkpoint, reference: Model) -> None:
    red, blue = Image.new("RGB", (90, 60), "red"), Image.new("RGB", (90, 60), "blue")
    num_tokens = picture_info(red, checkpoint)[0].num_tokens
    picture = [checkpoint.config["vision_start_token_id"], *[checkpoint.image_token_id] * num_tokens]
    prompt = [5, *picture, checkpoint.config["vision_end_token_id"], 6, 7, *picture, 8, 9]
    offsets = [2, 2 + num_tokens + 4]
    answers = set()
    for pictures in ([red, blue], [blue, red], [red, red]):
        expected = reference.generate(prompt, pictures, MAX_TOKENS, ignore_eos=True)
        sequence = new_sequence(engine, checkpoint, Case(prompt, pictures, offsets, expected), GREEDY)
        finish(engine, [sequence])
        assert expected.difference(output(sequence)) is None
        assert len(set(output(sequence))) > 2  # no loop of one token
        answers.add(tuple(output(sequence)))
        release(engine, [sequence])
    assert len(answers) == 3


def test_patches_equal_those_of_transformers(engine: TorchEngine, checkpoint: Checkpoint, reference: Model) -> None:
    rng = np.random.default_rng(3)
    for size in ((56, 84), (15, 200), (301, 77), (700, 500)):
        picture = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        expected = reference.image_processor(images=[picture], return_tensors="pt")
        info, pixels = picture_info(picture, checkpoint)
        assert info.grid_thw == tuple(expected["image_grid_thw"][0].tolist())
        torch.testing.assert_close(patchify(pixels, checkpoint.image), expected["pixel_values"], rtol=0, atol=1e-6)


def test_several_images_encode_as_each_alone(engine: TorchEngine, checkpoint: Checkpoint, cases: list[Case]) -> None:
    described = [picture_info(picture, checkpoint) for case in cases for picture in case.pictures]
    together = engine.encode([d[0] for d in described], [d[1] for d in described])
    for (info, pixels), embedded in zip(described, together, strict=True):
        torch.testing.assert_close(engine.encode([info], [pixels])[0], embedded, rtol=1e-4, atol=1e-4)


def test_an_image_that_is_not_as_described_is_refused(engine: TorchEngine, checkpoint: Checkpoint) -> None:
    info, pixels = picture_info(Image.new("RGB", (60, 60)), checkpoint)
    wrong = [
        (ImageInfo(b"", info.height, info.width, info.grid_thw, info.num_tokens + 1), pixels),
        (ImageInfo(b"", info.height, info.width, (1, 2, 2), info.num_tokens), pixels),
        (info, pixels[:28]),
        (info, pixels.to(torch.float32)),
        (ImageInfo(b"", 30, 30, (1, 2, 2), 1), torch.zeros(30, 30, 3, dtype=torch.uint8)),
    ]
    for described, given in wrong:
        with pytest.raises(InternalError):
            engine.encode([described], [given])


def test_placeholders_must_match_the_images(engine: TorchEngine, checkpoint: Checkpoint) -> None:
    pad = checkpoint.image_token_id
    info = picture_info(Image.new("RGB", (56, 56)), checkpoint)[0]
    size = info.num_tokens
    embedded = torch.zeros(size, 128)
    good = ImageSpan(1, info, embedded)
    pads = [pad] * size
    bad: list[tuple[list[int], list[ImageSpan]]] = [
        ([], []),
        ([1, 2, 5000], []),
        ([1, -1], []),
        ([1, pad, 2], []),
        ([1, *pads, 2, pad], [good]),
        ([1, 2, *pads], [good]),
        ([1, *pads], [ImageSpan(1, info, embedded[1:])]),
        ([1, *pads], [good, good]),
        ([1, *pads, *pads], [good, ImageSpan(1 + size, info, embedded)]),
        ([1, *pads, 2, *pads], [ImageSpan(2 + size, info, embedded), good]),
        ([1, *pads], [ImageSpan(-1, info, embedded)]),
        ([1, *pads], [ImageSpan(2, info, embedded)]),
    ]
    for tokens, images in bad:
        with pytest.raises(InternalError):
            engine.prepare(Sequence(RequestId("r"), tokens, len(tokens), GREEDY, images))
    engine.prepare(Sequence(RequestId("r"), [1, *pads, 2], size + 2, GREEDY, [good]))


def test_a_bad_chunk_is_refused_before_anything_is_written(engine: TorchEngine) -> None:
    sequence = Sequence(RequestId("r"), list(range(20)), 20, GREEDY)
    engine.prepare(sequence)
    sequence.block_table = engine.block_pool.allocate(1)
    for num_tokens in (0, 17, 21):
        with pytest.raises(InternalError):
            engine.run([Chunk(sequence, num_tokens)])
    unprepared = Sequence(RequestId("r"), [1, 2], 2, GREEDY, [], sequence.block_table)
    with pytest.raises(InternalError):
        engine.run([Chunk(unprepared, 2)])
    assert sequence.num_computed_tokens == 0
    release(engine, [sequence])


def test_blocks_of_another_shape_are_refused(engine: TorchEngine) -> None:
    shape, dtype = engine.exported_shape(2)
    with pytest.raises(InternalError):
        engine.import_blocks(torch.zeros(shape, dtype=dtype), [0])
    with pytest.raises(InternalError):
        engine.import_blocks(torch.zeros(shape, dtype=torch.float64), [0, 1])
    with pytest.raises(InternalError):
        engine.export_blocks([0], torch.zeros(shape, dtype=dtype))


def test_exported_blocks_can_land_in_a_strided_tensor(engine: TorchEngine) -> None:
    shape, dtype = engine.exported_shape(2)
    engine.import_blocks(torch.randn(shape, dtype=dtype), [3, 1])
    out = torch.zeros((*shape[:-1], shape[-1] * 2), dtype=dtype)[..., ::2]
    torch.testing.assert_close(engine.export_blocks([3, 1], out), engine.export_blocks([3, 1]), rtol=0, atol=0)


def test_limits_and_identity(engine: TorchEngine, checkpoint: Checkpoint) -> None:
    small = load_engine(checkpoint, Settings(kv_cache_bytes=1 << 20))
    assert small.model_card.max_model_len == small.block_pool.num_blocks * small.block_size < 8192
    assert load_engine(checkpoint, Settings(max_model_len=100)).model_card.max_model_len == 100
    assert load_engine(checkpoint, Settings()).model_card.max_model_len == 8192
    assert engine.model_card.random_weights
    assert make_engine(checkpoint, 8).kv_layout != engine.kv_layout
    assert load_engine(checkpoint, Settings(dtype="bfloat16")).kv_layout != engine.kv_layout
    with pytest.raises(BadRequest):
        load_engine(checkpoint, Settings(block_size=256, kv_cache_bytes=1 << 16))


def test_bfloat16_runs(checkpoint: Checkpoint, cases: list[Case]) -> None:
    engine = load_engine(checkpoint, Settings(dtype="bfloat16", kv_cache_bytes=8 << 20))
    sequences = [new_sequence(engine, checkpoint, case, GREEDY) for case in cases[:4]]
    finish(engine, sequences)
    assert all(0 <= token < 1024 for s in sequences for token in output(s))
    release(engine, sequences)
