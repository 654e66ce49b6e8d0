"""The passes that are measured fit what the instance takes, and vary all that the costs depend on."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.services.profiler.grid import (
    FULL,
    QUICK,
    Grid,
    Limits,
    decode_batches,
    encode_batches,
    picture_sizes,
    prefill_steps,
)
from triptych.services.profiler.timing import MIN_PASSES
from triptych.shared.checkpoint import ImageOptions, grid_thw, num_image_tokens
from triptych.shared.settings import Settings

IMAGES = ImageOptions(14, 2, 2, 56 * 56, 448 * 448, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
DEFAULT = Limits.of(Settings(), 8192, 20_000, IMAGES)
grids = st.sampled_from([QUICK, FULL])
limits = st.builds(
    Limits,
    max_model_len=st.integers(64, 40_000),
    num_kv_tokens=st.integers(64, 400_000),
    max_prefill_tokens=st.integers(16, 4096),
    max_encode_tokens=st.integers(1, 20_000),
    max_num_seqs=st.integers(1, 200),
    image=st.just(IMAGES),
)


@given(grids, limits)
def test_no_pass_is_more_than_the_instance_takes(grid: Grid, limit: Limits) -> None:
    for step in prefill_steps(grid, limit):
        lengths = [chunk.num_context_tokens + chunk.num_tokens for chunk in step]
        assert max(lengths) <= limit.max_model_len
        assert sum(lengths) <= limit.num_kv_tokens
        assert sum(chunk.num_tokens for chunk in step) <= limit.max_prefill_tokens
    for batch in decode_batches(grid, limit):
        assert batch.num_context_tokens + batch.num_sequences <= limit.num_kv_tokens
        assert batch.num_context_tokens // batch.num_sequences < limit.max_model_len
        assert batch.num_sequences <= limit.max_num_seqs
    for images in encode_batches(grid, limit):
        num_tokens = num_image_tokens(grid_thw(images.height, images.width, IMAGES), IMAGES)
        assert images.num_images == 1 or images.num_images * num_tokens <= limit.max_encode_tokens


@pytest.mark.parametrize("grid", [QUICK, FULL], ids=["quick", "full"])
def test_with_the_default_settings_everything_varies(grid: Grid) -> None:
    steps = prefill_steps(grid, DEFAULT)
    assert {len(step) for step in steps} >= {1, 2, 4, 8}
    assert {step[0].num_context_tokens for step in steps if len(step) == 1} >= {0, 512}
    assert max(sum(chunk.num_tokens for chunk in step) for step in steps) == 512
    batches = decode_batches(grid, DEFAULT)
    assert {batch.num_sequences for batch in batches} >= {1, 64}
    assert {batch.num_context_tokens // batch.num_sequences for batch in batches if batch.num_sequences == 1} >= {32, 1024}
    images = encode_batches(grid, DEFAULT)
    assert len(set(images)) == len(images)
    assert {image.height for image in images} >= {56, 448}
    assert max(image.height for image in images) == 448  # the model makes the larger ones equal
    sizes = picture_sizes(grid, Settings().max_image_pixels)
    assert any(width != height for width, height in sizes)
    for passes in (steps, batches, images, sizes):
        assert len(passes) >= MIN_PASSES


def test_quick_is_less_than_full() -> None:
    for field in dataclasses.fields(Grid):
        assert len(getattr(QUICK, field.name)) <= len(getattr(FULL, field.name))
