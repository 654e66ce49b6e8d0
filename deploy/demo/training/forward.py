"""The forward pass of Qwen2.5-VL over the weights of the transformers module, batched for training.

It equals transformers' own on every prompt of a row taken alone (a test compares): pictures of equal size share an attention
call, and questions share a row with the pictures they ask about, and rows share a line, without seeing each other.

  N patches, C cells (2 x 2 patches, one token each), R lines, L tokens of a line, A answer tokens, D width
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.batches import Batch
from triptych.loadgen.checkpoint import PROCESSOR

VISION_ROPE_THETA = 10_000.0  # fixed in the architecture
EARLY_LAYER = 1  # the text layer, not the last, after which a picture token should know of which picture it is, and where


class Outputs(NamedTuple):
    """answer_logits [A, vocabulary]: at the tokens before each answer token; cells [C, D]: the vision tower's; early
    [C, D]: the picture tokens after text layer EARLY_LAYER."""

    answer_logits: Tensor
    cells: Tensor
    early: Tensor


def forward(model: Any, batch: Batch[Tensor]) -> Outputs:
    embedded = model.model.language_model.embed_tokens(batch.token_ids)
    cells = see(model.model.visual, batch)
    tokens = embedded.flatten(0, 1).index_copy(0, batch.cell_at, cells.to(embedded.dtype)).view_as(embedded)
    answering, early = _read(model.model.language_model, tokens, batch)
    return Outputs(model.lm_head(answering), cells, early.flatten(0, 1)[batch.cell_at])


def see(tower: Any, batch: Batch[Tensor]) -> Tensor:
    """The vision tower: [C, D of the text model], pictures one after another, cells in reading order."""
    config = tower.config
    num_heads, head_size = config.num_heads, config.hidden_size // config.num_heads
    patches = F.linear(_normalized(batch.pixels), tower.patch_embed.proj.weight.sum(2).flatten(1))  # a still: two equal frames
    turn = _vision_rope(batch.patch_yx, head_size)
    by_window, by_picture = batch.windows, torch.argsort(batch.windows)
    in_windows = False
    for index, block in enumerate(tower.blocks):
        if in_windows != (index not in config.fullatt_block_indexes):
            order = by_picture if in_windows else by_window
            patches, turn, in_windows = patches[order], tuple(t[order] for t in turn), not in_windows
        lengths = batch.window_lengths if in_windows else batch.picture_lengths
        qkv = block.attn.qkv(_rms_norm(patches, block.norm1.weight)).view(-1, 3, num_heads, head_size)
        qk = _turned(qkv[:, :2], *(t[:, None, None] for t in turn))
        patches = patches + block.attn.proj(_attend_apart(qk[:, 0], qk[:, 1], qkv[:, 2], lengths))
        hidden, mlp = _rms_norm(patches, block.norm2.weight), block.mlp
        patches = patches + mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
    patches = patches[by_picture] if in_windows else patches
    merged = _rms_norm(patches, tower.merger.ln_q.weight).view(-1, 4 * config.hidden_size)
    cells: Tensor = tower.merger.mlp(merged)
    return cells


def _attend_apart(q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]]) -> Tensor:
    """Attention within runs of patches; lengths: (patches of a run, how many runs of that length follow)."""
    outputs, start = [], 0
    for length, count in lengths:
        end = start + length * count
        runs = (x[start:end].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(next(runs), next(runs), next(runs))
        outputs.append(attended.transpose(1, 2).reshape(length * count, -1))
        start = end
    return torch.cat(outputs)


def _read(text: Any, tokens: Tensor, batch: Batch[Tensor]) -> tuple[Tensor, Tensor]:
    """The text model: hidden states [A, D] at the end, of the tokens before each answer token only, and [R, L, D] after layer
    EARLY_LAYER."""
    config, (num_lines, length, _) = text.config, tokens.shape
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_size, num_repeats = config.hidden_size // num_heads, num_heads // num_kv_heads
    mask, turn = _visible(batch), [t[:, :, None] for t in _text_rope(batch.positions, config.rope_parameters, head_size)]
    early = tokens
    for index, layer in enumerate(text.layers):
        attention, mlp = layer.self_attn, layer.mlp
        hidden = _rms_norm(tokens, layer.input_layernorm.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight, bias = torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])
        qkv = F.linear(hidden, weight, bias).view(num_lines, length, -1, head_size)
        qk = _turned(qkv[:, :, : num_heads + num_kv_heads], *turn).transpose(1, 2)
        k = qk[:, num_heads:].repeat_interleave(num_repeats, 1)
        v = qkv[:, :, num_heads + num_kv_heads :].transpose(1, 2).repeat_interleave(num_repeats, 1)
        attended = F.scaled_dot_product_attention(qk[:, :num_heads], k, v, attn_mask=mask)
        tokens = tokens + attention.o_proj(attended.transpose(1, 2).reshape(num_lines, length, -1))
        if layer is text.layers[-1]:
            tokens = tokens.flatten(0, 1)[batch.answer_at]
        hidden = _rms_norm(tokens, layer.post_attention_layernorm.weight)
        gate, up = F.linear(hidden, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])).chunk(2, -1)
        tokens = tokens + mlp.down_proj(F.silu(gate) * up)
        early = tokens if index == EARLY_LAYER else early
    return _rms_norm(tokens, text.norm.weight), early


def _visible(batch: Batch[Tensor]) -> Tensor:
    """Additive mask [R, 1, L, L]: a token sees what came before it in its own prompt, and of that its own question and what
    all questions share (part 0). Padding sees itself, so that no row of scores is empty."""
    row, part = batch.row_index, batch.part_index
    length = row.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=row.device).tril()
    shared = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    visible = causal & shared & (row[:, None, :] == row[:, :, None])
    return torch.zeros(visible.shape, device=row.device).masked_fill_(~visible, -1e9)[:, None]


def _normalized(pixels: Tensor) -> Tensor:
    """uint8 [N, RGB x patch] -> what the image processor makes of it."""
    patch_px = pixels.shape[1] // 3
    mean, std = (
        torch.tensor(PROCESSOR[name], device=pixels.device).repeat_interleave(patch_px) for name in ("image_mean", "image_std")
    )
    return (pixels.float() / 255 - mean) / std


def _vision_rope(patch_yx: Tensor, head_size: int) -> tuple[Tensor, ...]:
    """Cosine and sine [N, head_size]: a quarter of the head turns with y, one with x, and both again."""
    exponents = torch.arange(0, head_size // 2, 2, device=patch_yx.device, dtype=torch.float) / (head_size // 2)
    angles = (patch_yx.T[..., None] * VISION_ROPE_THETA**-exponents).flatten(1)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _text_rope(positions: Tensor, rope: dict[str, Any], head_size: int) -> tuple[Tensor, ...]:
    """positions [3, R, L] (time, height, width) -> cosine and sine [R, L, head_size]: which of the three turns a frequency
    is laid down in mrope_section."""
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float) / head_size
    axis = torch.tensor(
        [axis for axis, count in enumerate(rope["mrope_section"]) for _ in range(count)], device=positions.device
    )
    angles = positions.permute(1, 2, 0)[..., axis] * rope["rope_theta"] ** -exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
