"""How a batch of chunks is laid out for one forward pass: where each token's KV goes, and what it attends to.

All chunks are packed in one row of tokens, those of one token first:

    tokens of a pass:   d0 d1 d2 d3 | p p p p p p p | q q q
                        decode, in groups of like context where it is gathered; then each longer chunk by itself

Shapes: T packed tokens, B sequences of a group, S tokens of context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from triptych.shared.engine.api import Chunk
from triptych.shared.engine.kv_cache import Context, KvCache
from triptych.shared.engine.paged_group import PagedGroup, PagedGroups

_GROUP_SLACK_TOKENS = 128  # chosen: contexts that differ by less are padded to one length rather than run apart


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Some packed tokens, [begin, end), that attend together: a group of single tokens of B sequences, or one chunk.

    context: None for a chunk that has nothing before it. mask: additive, model dtype, 0 or -inf: [B, 1, 1, S] for a group,
    None when all its contexts are equally long; [T, S] for a chunk, None without a context. A PagedGroup has its own.
    """

    begin: int
    end: int
    is_group: bool
    context: Context | PagedGroup | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What all layers need to know of one forward pass.

    order: index into the chunks given, in packed order. places: where each token's KV goes. finishing: those chunks that
    reach the end of their tokens, in an order of their own; last_rows: int64, the last packed token of each, None when these
    are all tokens in order. last_parts: of a row of the tokens at last_rows alone.
    """

    order: list[int]
    places: torch.Tensor
    parts: list[AttentionPart]
    finishing: list[int]
    last_rows: torch.Tensor | None
    last_parts: list[AttentionPart]
    kv: KvCache


def plan_batch(chunks: Seq[Chunk], kv: KvCache, paged: PagedGroups | None = None) -> BatchPlan:
    """Order the chunks, and find out where each token's KV goes and what it attends to. paged: None where groups are
    gathered."""
    num_ctx = [chunk.sequence.num_computed_tokens + chunk.num_tokens for chunk in chunks]
    by_length = sorted(range(len(chunks)), key=lambda i: -num_ctx[i])
    singles = [i for i in by_length if chunks[i].num_tokens == 1]
    longer = [i for i in by_length if chunks[i].num_tokens > 1]
    order = singles + longer
    spans = [(chunks[i].sequence.block_table, chunks[i].sequence.num_computed_tokens, num_ctx[i]) for i in order]
    places = kv.places(spans)
    finishing = [i for i in by_length if num_ctx[i] == len(chunks[i].sequence.token_ids)]
    parts = _plan_groups(singles, num_ctx, chunks, kv, paged)
    if not longer and len(finishing) == len(chunks):
        return BatchPlan(order, places, parts, finishing, None, parts, kv)
    for i in longer:
        parts.append(_plan_chunk(parts[-1].end if parts else 0, chunks[i], kv))
    ends = dict(zip(order, itertools.accumulate(chunks[i].num_tokens for i in order), strict=True))
    last_rows = torch.tensor([ends[i] - 1 for i in finishing], dtype=torch.int64, device=kv.device)
    last_parts = _plan_groups(finishing, num_ctx, chunks, kv, paged)
    return BatchPlan(order, places, parts, finishing, last_rows, last_parts, kv)


def _plan_groups(
    singles: list[int], num_ctx: list[int], chunks: Seq[Chunk], kv: KvCache, paged: PagedGroups | None
) -> list[AttentionPart]:
    """Single tokens in a row, each the last one of its context; longest context first."""
    if paged is not None:
        group = paged.group([chunks[i].sequence.block_table for i in singles], [num_ctx[i] for i in singles])
        return [AttentionPart(0, len(singles), True, group, None)] if singles else []
    parts: list[AttentionPart] = []
    for members in _groups(singles, num_ctx):
        begin, num_group_ctx = parts[-1].end if parts else 0, [num_ctx[i] for i in members]
        context = kv.context([chunks[i].sequence.block_table for i in members], num_group_ctx[0])
        parts.append(AttentionPart(begin, begin + len(members), True, context, _group_mask(num_group_ctx, kv)))
    return parts


def _groups(singles: list[int], num_ctx: list[int]) -> list[list[int]]:
    """Cut sequences, longest context first, into groups whose padding to the longest costs less than as much again."""
    groups: list[list[int]] = []
    for i in singles:
        if groups and num_ctx[i] >= num_ctx[groups[-1][0]] // 2 - _GROUP_SLACK_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _group_mask(num_ctx: list[int], kv: KvCache) -> torch.Tensor | None:
    if num_ctx[-1] == num_ctx[0]:
        return None
    index = torch.arange(num_ctx[0], device=kv.device)
    return _mask(index >= torch.tensor(num_ctx, device=kv.device)[:, None], kv)[:, None, None, :]


def _plan_chunk(begin: int, chunk: Chunk, kv: KvCache) -> AttentionPart:
    start, end = chunk.sequence.num_computed_tokens, begin + chunk.num_tokens
    if start == 0:
        return AttentionPart(begin, end, False, None, None)
    num_ctx = start + chunk.num_tokens
    context = kv.context([chunk.sequence.block_table], num_ctx)
    index = torch.arange(num_ctx, device=kv.device)
    return AttentionPart(begin, end, False, context, _mask(index > index[start:, None], kv))


def _mask(is_hidden: torch.Tensor, kv: KvCache) -> torch.Tensor:
    return torch.zeros(is_hidden.shape, dtype=kv.dtype, device=kv.device).masked_fill_(is_hidden, float("-inf"))
