"""Checks of prompts and chunks, and positions of a chunk wherever it is cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.positions import check_chunk, check_prompt, packed_positions
from triptych.shared.errors import InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams

PAD = 99
VOCAB = 100


def sequence(tokens: list[int], spans: list[tuple[int, int]], num_output: int = 0) -> Sequence:
    """spans: (offset, num_tokens) of each image."""
    images = [
        ImageSpan(offset, ImageInfo(b"", 28, 28, (1, 2, 2), size), torch.zeros(max(size, 0), 4)) for offset, size in spans
    ]
    return Sequence(RequestId("r"), tokens, len(tokens) - num_output, SamplingParams(max_tokens=4), images)


layouts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), max_size=4)  # (text tokens before, size) of each image


def laid_out(layout: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    tokens, spans = [], []
    for num_text, size in layout:
        tokens += [1] * num_text
        spans.append((len(tokens), size))
        tokens += [PAD] * size
    return [*tokens, 2], spans


@given(layouts)
def test_a_good_layout_passes(layout: list[tuple[int, int]]) -> None:
    tokens, spans = laid_out(layout)
    check_prompt(sequence(tokens, spans), PAD, VOCAB)


@given(layouts, st.data())
def test_any_other_span_or_number_of_placeholders_is_refused(layout: list[tuple[int, int]], data: st.DataObject) -> None:
    tokens, spans = laid_out(layout)
    index = data.draw(st.integers(0, len(spans)))
    if index == len(spans):
        tokens.append(PAD)
    else:
        moved = (spans[index][0] + data.draw(st.integers(-9, 9)), spans[index][1] + data.draw(st.integers(-9, 9)))
        if moved == spans[index]:
            return
        spans[index] = moved
    with pytest.raises(InternalError):
        check_prompt(sequence(tokens, spans), PAD, VOCAB)


def test_output_tokens_are_no_part_of_the_prompt() -> None:
    check_prompt(sequence([1, 2, PAD], [], num_output=1), PAD, VOCAB)


def test_a_prompt_shorter_than_announced_is_refused() -> None:
    short = sequence([1, 2], [])
    short.num_prompt_tokens = 3
    with pytest.raises(InternalError):
        check_prompt(short, PAD, VOCAB)


@given(st.integers(1, 20), st.integers(0, 20), st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_chunks_make_up_the_positions_of_the_whole(num_prompt: int, num_output: int, sizes: list[int]) -> None:
    whole = sequence([1] * (num_prompt + num_output), [], num_output)
    whole.positions = torch.arange(3 * num_prompt).view(3, num_prompt)
    whole.position_delta = -3
    end = len(whole.token_ids)
    chunks, start = [], 0
    for size in sizes:
        if start < end:
            size = min(size, end - start)
            chunks.append(Chunk(dataclasses.replace(whole, num_computed_tokens=start), size))
            start += size
    expected = torch.cat([whole.positions, (torch.arange(num_prompt, end) - 3).expand(3, -1)], dim=1)
    assert torch.equal(packed_positions(chunks), expected[:, :start])


def test_a_prompt_without_positions_is_refused() -> None:
    with pytest.raises(InternalError):
        packed_positions([Chunk(sequence([1, 2], []), 2)])


@pytest.mark.parametrize(("num_computed", "num_tokens", "num_blocks"), [(0, 0, 9), (0, 11, 9), (4, 7, 9), (0, 9, 2), (8, 1, 2)])
def test_a_chunk_beyond_its_tokens_or_blocks_is_refused(num_computed: int, num_tokens: int, num_blocks: int) -> None:
    ten = sequence([1] * 10, [])
    ten.num_computed_tokens, ten.block_table = num_computed, list(range(num_blocks))
    with pytest.raises(InternalError):
        check_chunk(Chunk(ten, num_tokens), 4)


def test_a_chunk_up_to_the_end_of_tokens_and_blocks_passes() -> None:
    eight = sequence([1] * 8, [])
    eight.num_computed_tokens, eight.block_table = 3, [5, 2]
    check_chunk(Chunk(eight, 5), 4)
