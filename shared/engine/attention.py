"""Attention over a paged KV cache, called by every layer: by fused_text.py directly, by transformers' models as the
attention implementation ATTENTION_NAME.

Shapes: T packed tokens (see batch_plan.py), R rows that are asked for,
B sequences of a group, N query heads, K kv heads, G = N / K, H head size,
S tokens of context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.shared.engine.batch_plan import AttentionPart, BatchPlan
from triptych.shared.engine.paged_group import PagedGroup

ATTENTION_NAME = "triptych_paged"


def attend(
    plan: BatchPlan,
    layer: int,
    parts: list[AttentionPart],
    query_RNH: torch.Tensor,
    kv_T2KH: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One layer's attention: keeps the tokens' keys and values, and returns [R, N * H].

    Args:
        parts: plan.parts, where R is T; or plan.last_parts, when no other layer will ask for any but the tokens at
            plan.last_rows.
        kv_T2KH: keys, then values.
    """
    plan.kv.write(layer, plan.places, kv_T2KH)
    if len(parts) == 1:
        return _attend_part(plan, layer, parts[0], query_RNH, kv_T2KH, scale)
    cut = [(part, slice(part.begin, part.end)) for part in parts]
    outputs = [_attend_part(plan, layer, part, query_RNH[rows], kv_T2KH[rows], scale) for part, rows in cut]
    return torch.cat(outputs or [query_RNH.flatten(1)])


def _attend_part(
    plan: BatchPlan, layer: int, part: AttentionPart, query_RNH: torch.Tensor, kv_R2KH: torch.Tensor, scale: float
) -> torch.Tensor:
    if part.context is None:
        keys, values = kv_R2KH.transpose(0, 1).chunk(2)
        return _attend_chunk(query_RNH, keys, values, None, scale)
    if isinstance(part.context, PagedGroup):
        return part.context.attend(layer, query_RNH, scale)
    plan.kv.gather(layer, part.context)
    keys, values = part.context.keys, part.context.values
    if part.is_group:
        return _attend_group(query_RNH, keys, values, part.mask, scale)
    return _attend_chunk(query_RNH, keys[0], values[0], part.mask, scale)


def _attend_group(
    query_BNH: torch.Tensor, keys_BKSH: torch.Tensor, values_BKSH: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One token each of B sequences. The G query heads of a kv head see the same context under the same mask, so they
    stand as G queries of one head: no copies of keys. Returns [B, N * H]."""
    batch, num_kv_heads, _, head_size = keys_BKSH.shape
    query_BKGH = query_BNH.view(batch, num_kv_heads, -1, head_size)
    output_BKGH = scaled_dot_product_attention(query_BKGH, keys_BKSH, values_BKSH, attn_mask=mask, scale=scale)
    return output_BKGH.reshape(batch, -1)


def _attend_chunk(
    query_TNH: torch.Tensor, keys_KSH: torch.Tensor, values_KSH: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The tokens of one chunk; without a mask they are the sequence's first ones. Returns [T, N * H]."""
    num_tokens, num_heads, head_size = query_TNH.shape
    num_kv_heads = len(keys_KSH)
    num_groups = num_heads // num_kv_heads
    query_KGTH = query_TNH.view(num_tokens, num_kv_heads, num_groups, head_size).permute(1, 2, 0, 3)
    keys = keys_KSH.unsqueeze(1).expand(-1, num_groups, -1, -1)  # no copy: the kernels go by strides
    values = values_KSH.unsqueeze(1).expand(-1, num_groups, -1, -1)
    output = scaled_dot_product_attention(query_KGTH, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
    return output.permute(2, 0, 1, 3).reshape(num_tokens, -1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, called by transformers. query [1, N, T, H], key and value [1, K, T, H]; returns [1, T, N * H].
    kwargs: `scaling`, and the BatchPlan as `plan`."""
    plan: BatchPlan = kwargs["plan"]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    kv_T2KH = torch.cat((key[0], value[0])).transpose(0, 1)
    return attend(plan, layer, plan.parts, query[0].transpose(0, 1), kv_T2KH, kwargs["scaling"]).unsqueeze(0), None
