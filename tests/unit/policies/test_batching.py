"""What goes into a step: batches, chunks, and when an output ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.policies.batching import (
    ENOUGH_S,
    chunk_sizes,
    finish_reason,
    num_blocks_for,
    num_to_batch,
    num_to_encode,
)
from triptych.shared.sampling_params import SamplingParams

sizes = st.lists(st.integers(1, 50), max_size=20)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks_for(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 16) == expected


@given(sizes, st.integers(1, 100))
def test_a_batch_is_the_longest_front_that_fits(items: list[int], max_total: int) -> None:
    count = num_to_batch(items, max_total)
    assert count >= min(1, len(items)), "a batch makes progress"
    assert count <= 1 or sum(items[:count]) <= max_total
    assert count == len(items) or sum(items[: count + 1]) > max_total


@given(sizes, st.integers(1, 100), st.floats(0, 2000))
def test_images_share_a_pass_of_so_many_seconds(items: list[int], max_tokens: int, tokens_per_s: float) -> None:
    count = num_to_encode(items, max_tokens, tokens_per_s)
    assert count >= min(1, len(items)), "a batch makes progress"
    assert count <= 1 or sum(items[:count]) <= min(max_tokens, ENOUGH_S * tokens_per_s)
    assert count == len(items) or sum(items[: count + 1]) > min(max_tokens, int(ENOUGH_S * tokens_per_s))


def test_the_first_image_goes_alone() -> None:
    assert num_to_encode([1, 1], 100, tokens_per_s=0.0) == 1


@given(sizes, st.integers(1, 100))
def test_chunks_go_to_the_front_first(remaining: list[int], max_tokens: int) -> None:
    chunks = chunk_sizes(remaining, max_tokens)
    assert sum(chunks) == min(max_tokens, sum(remaining))
    assert all(chunk <= size for chunk, size in zip(chunks, remaining, strict=True))
    num_whole = next((i for i, (c, r) in enumerate(zip(chunks, remaining, strict=True)) if c < r), len(chunks))
    assert all(chunk == 0 for chunk in chunks[num_whole + 1 :])


@pytest.mark.parametrize(
    ("token_id", "num_output_tokens", "num_tokens", "expected"),
    [(5, 1, 10, None), (7, 1, 10, "stop"), (5, 4, 10, "length"), (7, 4, 10, "stop"), (5, 2, 32, "length")],
)
def test_finish_reason(token_id: int, num_output_tokens: int, num_tokens: int, expected: str | None) -> None:
    sampling = SamplingParams(4, stop_token_ids=(7,))
    assert finish_reason(sampling, token_id, num_output_tokens, num_tokens, 32) == expected
