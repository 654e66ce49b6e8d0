"""Attention over a paged KV cache, plugged into transformers' models as the attention implementation ATTENTION_NAME.

`plan_batch` lays out a batch of chunks once per forward pass; `paged_attention` is called by every layer with that plan.
All chunks are packed in one row of tokens, those of one token first:

    tokens of a pass:   d0 d1 d2 d3 | p p p p p p p | q q q
                        decode, in groups of like context; then each longer chunk by itself

Shapes: T packed tokens, B sequences of a group, N query heads, K kv heads, G = N / K, H head size, S context slots.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.shared.engine.api import Chunk
from triptych.shared.engine.kv_cache import KvCache

ATTENTION_NAME = "triptych_paged"
_GROUP_SLACK_TOKENS = 128  # chosen: contexts that differ by less are padded to one length rather than run apart


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Some packed tokens, [begin, end), that attend together: a group of single tokens of B sequences, or one chunk.

    block_ids: int64 [B * num_blocks] whose slots hold the context, None for a chunk that has no context before it.
    mask: additive, model dtype, 0 or -inf: [B, 1, 1, S] for a group, [T, S] for a chunk, None with block_ids.
    """

    begin: int
    end: int
    is_group: bool
    block_ids: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What all layers need to know of one forward pass. order: index into the chunks given, in packed order; slots: int64
    [T], where each token's KV goes."""

    order: list[int]
    slots: torch.Tensor
    parts: list[AttentionPart]
    kv: KvCache


def plan_batch(chunks: Seq[Chunk], kv: KvCache) -> BatchPlan:
    """Order the chunks, and find out where each token's KV goes and what it attends to."""
    block_size = kv.block_size
    num_ctx = [chunk.sequence.num_computed_tokens + chunk.num_tokens for chunk in chunks]
    singles = sorted((i for i, chunk in enumerate(chunks) if chunk.num_tokens == 1), key=lambda i: -num_ctx[i])
    longer = [i for i, chunk in enumerate(chunks) if chunk.num_tokens > 1]
    parts: list[AttentionPart] = []
    for group in _groups(singles, num_ctx):
        begin = parts[-1].end if parts else 0
        tables = [chunks[i].sequence.block_table for i in group]
        parts.append(_plan_group(begin, tables, [num_ctx[i] for i in group], kv))
    for i in longer:
        begin = parts[-1].end if parts else 0
        parts.append(_plan_chunk(begin, chunks[i], kv))
    slots: list[int] = []
    for i in singles + longer:
        table = chunks[i].sequence.block_table
        start = chunks[i].sequence.num_computed_tokens
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(start, num_ctx[i]))
    return BatchPlan(singles + longer, torch.tensor(slots, device=kv.device), parts, kv)


def _groups(singles: list[int], num_ctx: list[int]) -> list[list[int]]:
    """Cut sequences, longest context first, into groups whose padding to the longest costs less than as much again."""
    groups: list[list[int]] = []
    for i in singles:
        if groups and num_ctx[i] >= num_ctx[groups[-1][0]] // 2 - _GROUP_SLACK_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _plan_group(begin: int, tables: list[list[int]], num_ctx: list[int], kv: KvCache) -> AttentionPart:
    num_blocks = -(-num_ctx[0] // kv.block_size)  # the longest comes first
    # padded with a block of its own: a masked NaN still spreads, and must not come from another request
    padded = [(table + table[-1:] * (num_blocks - len(table)))[:num_blocks] for table in tables]
    block_ids = torch.tensor(padded, device=kv.device).flatten()
    slot = torch.arange(num_blocks * kv.block_size, device=kv.device)
    masked_BS = slot[None, :] >= torch.tensor(num_ctx, device=kv.device)[:, None]
    mask = torch.zeros(masked_BS.shape, dtype=kv.dtype, device=kv.device).masked_fill_(masked_BS, float("-inf"))
    return AttentionPart(begin, begin + len(tables), True, block_ids, mask[:, None, None, :])


def _plan_chunk(begin: int, chunk: Chunk, kv: KvCache) -> AttentionPart:
    start, end = chunk.sequence.num_computed_tokens, begin + chunk.num_tokens
    if start == 0:
        return AttentionPart(begin, end, False, None, None)
    num_blocks = -(-(start + chunk.num_tokens) // kv.block_size)
    block_ids = torch.tensor(chunk.sequence.block_table[:num_blocks], device=kv.device)
    slot = torch.arange(num_blocks * kv.block_size, device=kv.device)
    index = torch.arange(start, start + chunk.num_tokens, device=kv.device)
    masked_TS = slot[None, :] > index[:, None]
    mask = torch.zeros(masked_TS.shape, dtype=kv.dtype, device=kv.device).masked_fill_(masked_TS, float("-inf"))
    return AttentionPart(begin, end, False, block_ids, mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, called by transformers. query [1, N, T, H], key and value [1, K, T, H]; returns [1, T, N, H].
    kwargs: `scaling`, and the BatchPlan as `plan`."""
    plan: BatchPlan = kwargs["plan"]
    scale: float = kwargs["scaling"]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    plan.kv.write(layer, plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    outputs = []
    for part in plan.parts:
        query_part = query[0, :, part.begin : part.end]  # [N, T, H]
        if part.block_ids is None:
            keys, values = key[0, :, part.begin : part.end], value[0, :, part.begin : part.end]
            outputs.append(_attend_chunk(query_part, keys, values, None, scale))
            continue
        keys_SKH, values_SKH = plan.kv.gather(layer, part.block_ids)
        if part.is_group:
            outputs.append(_attend_group(query_part, keys_SKH, values_SKH, part, scale))
        else:
            outputs.append(_attend_chunk(query_part, keys_SKH.transpose(0, 1), values_SKH.transpose(0, 1), part.mask, scale))
    output_TNH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_TNH.unsqueeze(0), None


def _attend_group(
    query_NBH: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: AttentionPart, scale: float
) -> torch.Tensor:
    """One token each of B sequences. The G query heads of a kv head see the same context under the same mask, so they
    stand as G queries of one head: no copies of keys. Returns [B, N, H]."""
    num_heads, batch, head_size = query_NBH.shape
    num_kv_heads = keys.shape[1]
    query_BKGH = query_NBH.transpose(0, 1).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_size)
    keys_BKSH = keys.view(batch, -1, num_kv_heads, head_size).transpose(1, 2)
    values_BKSH = values.view(batch, -1, num_kv_heads, head_size).transpose(1, 2)
    output = scaled_dot_product_attention(query_BKGH, keys_BKSH, values_BKSH, attn_mask=part.mask, scale=scale)
    return output.reshape(batch, num_heads, head_size)


def _attend_chunk(
    query_NTH: torch.Tensor, keys_KSH: torch.Tensor, values_KSH: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The tokens of one chunk; without a mask they are the sequence's first ones. Returns [T, N, H]."""
    num_heads, num_tokens, head_size = query_NTH.shape
    num_kv_heads = keys_KSH.shape[0]
    num_groups = num_heads // num_kv_heads
    query_KGTH = query_NTH.reshape(num_kv_heads, num_groups, num_tokens, head_size)
    keys = keys_KSH.unsqueeze(1).expand(-1, num_groups, -1, -1)  # no copy: the kernels go by strides
    values = values_KSH.unsqueeze(1).expand(-1, num_groups, -1, -1)
    output = scaled_dot_product_attention(query_KGTH, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return output.reshape(num_heads, num_tokens, head_size).transpose(0, 1)
