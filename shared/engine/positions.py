"""Where images and tokens are: checks of a prompt's placeholders, rotary positions of chunks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.errors import InternalError


def check_prompt(sequence: Sequence, image_token_id: int, vocab_size: int) -> None:
    """Refuse a prompt that would break a forward pass: the engine trusts what passed here.

    Raises:
        InternalError: a bug of whoever made it, nothing that a client did: it is empty, a token is out of the vocabulary,
            spans overlap, touch or leave the prompt, or the placeholders in it are not exactly those of the spans.
    """
    prompt = torch.tensor(sequence.token_ids[: sequence.num_prompt_tokens], dtype=torch.int64)
    if not 0 < sequence.num_prompt_tokens == len(prompt):
        raise InternalError("the prompt is empty or shorter than announced", code="invalid_prompt")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise InternalError("the prompt has a token outside the model's vocabulary", code="invalid_prompt")
    end = -1
    for span in sequence.images:
        if span.offset <= end or span.image.num_tokens < 1:  # touching spans would read as one image
            raise InternalError("image spans are empty, unsorted, overlapping, or not separated", code="invalid_image_spans")
        end = span.offset + span.image.num_tokens
        if end > len(prompt) or not bool((prompt[span.offset : end] == image_token_id).all()):
            raise InternalError("an image's placeholders are not where its span is", code="invalid_image_spans")
    num_placeholders = int((prompt == image_token_id).sum())
    num_image_tokens = sum(span.image.num_tokens for span in sequence.images)
    if num_placeholders != num_image_tokens:
        raise InternalError(
            f"the prompt has {num_placeholders} image placeholders for {num_image_tokens} image tokens",
            code="invalid_image_spans",
        )


def check_chunk(chunk: Chunk, block_size: int) -> None:
    """Raises InternalError when a chunk reaches past its tokens or its blocks."""
    sequence = chunk.sequence
    end = sequence.num_computed_tokens + chunk.num_tokens
    if chunk.num_tokens < 1 or end > len(sequence.token_ids):
        raise InternalError(f"a chunk of {chunk.num_tokens} tokens up to {end} of {len(sequence.token_ids)}")
    if end > len(sequence.block_table) * block_size:
        raise InternalError(f"{len(sequence.block_table)} KV blocks don't cover {end} tokens")


def packed_positions(chunks: Seq[Chunk]) -> torch.Tensor:
    """Rotary positions int64 [3, T] of the chunks' tokens in turn: the prompt's own, then index + position_delta.

    Raises:
        InternalError: a prompt's positions are needed and absent (Engine.prepare was not called).
    """
    later: list[int] = []
    prompts: list[tuple[int, torch.Tensor]] = []
    for chunk in chunks:
        sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
        end = start + chunk.num_tokens
        if start < sequence.num_prompt_tokens:
            if sequence.positions is None:
                raise InternalError("a prompt is computed before Engine.prepare")
            prompts.append((len(later), sequence.positions[:, start:end]))
        later.extend(range(start + sequence.position_delta, end + sequence.position_delta))
    positions_3T = torch.tensor(later).expand(3, -1)
    if prompts:
        positions_3T = positions_3T.clone()
    for row, own in prompts:
        positions_3T[:, row : row + own.shape[1]] = own
    return positions_3T
