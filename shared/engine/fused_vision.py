"""The vision tower of Qwen2.5-VL as few calls into torch, like fused_text.py the text layers.

Windows of one size attend in one call, and patches are put in that order once; the patch embedding is a product. Numbers
equal transformers' modules' but for rounding. Shapes: P patches, M merged tokens, D model (E of embeddings), N heads, H head
size, X = 3N, F = H / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from triptych.shared.engine.fused_layer import Hidden, Outputs, interleaved, nothing, times_norm, turn
from triptych.shared.engine.vision_layout import Run, VisionLayouts
from triptych.shared.engine.weights import Weight, make_weight

_KINDS = ("Qwen2_5_VLVisionBlock", "Qwen2_5_VLPatchMerger")
_TILE_ROWS = 512  # measured, 256 to 1024: within what measurements vary by


@dataclass(frozen=True, slots=True)
class _Layer:
    """qkv: of all heads. is_windowed: patches attend within their windows."""

    qkv: Weight
    outputs: Outputs
    is_windowed: bool


def can_fuse(tower: Any) -> bool:
    """Whether it is built like Qwen2.5-VL's."""
    kinds = {type(module).__name__ for module in (*tower.blocks, tower.merger)}
    return kinds == set(_KINDS) and tower.config.hidden_act == "silu" and tower.rotary_pos_emb.rope_type == "axial"


class FusedVision:
    """What the tower does, which is left without blocks. between_parts: called between parts of a layer."""

    def __init__(self, tower: Any) -> None:
        attention, merger, self._epsilon = tower.blocks[0].attn, tower.merger, float(tower.merger.ln_q.variance_epsilon)
        self._scale: float = attention.scaling
        self._head_size: int = attention.head_dim
        self._num_merged: int = tower.spatial_merge_unit
        merge_size: int = tower.spatial_merge_size
        frequency_Q: torch.Tensor = tower.rotary_pos_emb.inv_freq.to(attention.qkv.weight.device, torch.float32)
        self._layouts = VisionLayouts(merge_size, tower.window_size // merge_size // tower.patch_size, frequency_Q)
        patch_weight: torch.Tensor = tower.patch_embed.proj.weight
        self._dtype, self._embedding = patch_weight.dtype, make_weight(patch_weight.flatten(1))
        first, _, second = merger.mlp
        weight = times_norm(first.weight.unflatten(1, (self._num_merged, -1)), merger.ln_q.weight).flatten(1)
        self._merging, self._merged = make_weight(weight, first.bias), make_weight(second.weight, second.bias)
        self.between_parts: Callable[[], None] = nothing
        num_layers, full = len(tower.blocks), set(tower.fullatt_block_indexes)
        # one at a time: both forms of all of them would take twice the memory
        self._layers = [_fused(tower.blocks.pop(0), index not in full) for index in range(num_layers)]

    def forward(self, patches: torch.Tensor, grids: Seq[tuple[int, int, int]]) -> torch.Tensor:
        """Embeddings [M, E] of all pictures. patches: [P, C * T * S * S]; grids: of each picture frames, height and width."""
        layout = self._layouts.lay_out(grids)
        embeds_PD = self._embedding.product(patches.to(self._dtype))
        hidden = Hidden.of(embeds_PD[layout.order_P], self._epsilon)
        tiles = hidden.tiles(_TILE_ROWS)
        for layer in self._layers:
            self.between_parts()
            qkv_PXH = torch.unflatten(layer.qkv.product(hidden.normed()), 1, (-1, self._head_size))
            self.between_parts()
            turn(qkv_PXH[:, : qkv_PXH.shape[1] // 3 * 2], layout.turns_PF)
            attended_PX = self._attended(qkv_PXH, layout.windows if layer.is_windowed else layout.frames)
            for tile, attended in zip(tiles, torch.split(attended_PX, _TILE_ROWS), strict=True):
                self.between_parts()
                layer.outputs.add(tile, attended)
        merged = self._merge(hidden.normed())
        return torch.empty_like(merged).index_copy_(0, layout.order_M, merged)

    def _attended(self, qkv_PXH: torch.Tensor, runs: list[Run]) -> torch.Tensor:
        """[P, N * H]."""
        rows: list[torch.Tensor] = []
        for run in runs:
            sequences = torch.unflatten(qkv_PXH[run.begin : run.end], 0, (run.num_sequences, -1))
            query, key, value = sequences.transpose(1, 2).chunk(3, dim=1)
            attended = scaled_dot_product_attention(query, key, value, scale=self._scale)
            rows.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _merge(self, normed_PD: torch.Tensor) -> torch.Tensor:
        """[M, E]."""
        units = normed_PD.reshape(-1, self._num_merged * normed_PD.shape[1])
        return self._merged.product(gelu(self._merging.product(units)))


def _fused(block: Any, is_windowed: bool) -> _Layer:
    attention, head_size = block.attn, block.attn.head_dim
    weight, bias = (_interleaved_qk(tensor, head_size) for tensor in (attention.qkv.weight, attention.qkv.bias))
    qkv = make_weight(times_norm(weight, block.norm1.weight), bias)
    return _Layer(qkv, Outputs.of(attention.proj, block.mlp, block.norm2.weight), is_windowed)


def _interleaved_qk(qkv: torch.Tensor, head_size: int) -> torch.Tensor:
    qk, values = qkv.tensor_split((len(qkv) // 3 * 2,))
    return torch.cat((interleaved(qk, head_size), values))
