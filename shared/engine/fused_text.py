"""The text layers of a transformers model as few calls into torch: on a CPU a small model's step is mostly calls.

Query, key and value are one product, gate and up another (see fused_layer.py). Numbers equal the modules' but for rounding.
Shapes: T packed tokens, R rows asked for, D model, N query heads, K kv heads, X = N + 2K, H head size, F = H / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from triptych.shared.engine.attention import attend
from triptych.shared.engine.batch_plan import BatchPlan
from triptych.shared.engine.fused_layer import Hidden, Outputs, interleaved, nothing, times_norm, turn
from triptych.shared.engine.weights import Weight, make_weight

KEY_ORDER = "interleaved"  # of a head in the KV: blocks of modules, whose heads are in halves, don't fit
_LAYER_KINDS = ("Qwen2_5_VLDecoderLayer",)
_MOVING_ROPE_KINDS = ("dynamic", "longrope")  # their frequencies depend on how long a sequence is
_MANY_ROWS = 64  # chosen: from here a pass takes long enough for something to change meanwhile
_TILE_ROWS = 256  # measured: what the MLP works on at once stays in a core's cache, and in memory that malloc keeps


@dataclass(frozen=True, slots=True)
class _Layer:
    """qkv: of all heads."""

    qkv: Weight
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class _LastLayer:
    """Of other tokens than those asked for, only keys and values are wanted."""

    query: Weight
    kv: Weight
    outputs: Outputs


def can_fuse(text_model: Any) -> bool:
    """Whether its layers are built like Qwen2.5's, with frequencies that stay."""
    config = text_model.config
    is_known = all(type(layer).__name__ in _LAYER_KINDS for layer in text_model.layers)
    return is_known and config.hidden_act == "silu" and text_model.rotary_emb.rope_type not in _MOVING_ROPE_KINDS


class FusedText:
    """The layers and the last norm of text_model, which is left without layers.

    Args:
        axis_F: int64, which of the three rotary positions (time, height, width) turns each frequency.

    between_parts: called where many tokens are computed.
    """

    def __init__(self, text_model: Any, axis_F: torch.Tensor) -> None:
        attention, norm, rotary = text_model.layers[0].self_attn, text_model.norm, text_model.rotary_emb
        weight: torch.Tensor = norm.weight
        self._head_size: int = attention.head_dim
        self._num_heads: int = text_model.config.num_attention_heads
        self._num_turned = self._num_heads + text_model.config.num_key_value_heads
        self._scale: float = attention.scaling
        self._axis_F = axis_F.to(weight.device)
        self._frequency_F = rotary.inv_freq.to(weight.device, torch.float32)
        self._rotary_scale = torch.tensor(rotary.attention_scaling, dtype=torch.float32, device=weight.device)
        self._norm_weight_D = weight * len(weight) ** 0.5
        self._epsilon: float = norm.variance_epsilon
        self.between_parts: Callable[[], None] = nothing
        self._layers: list[_Layer] = []
        while len(text_model.layers) > 1:  # one at a time: both forms of all of them would take twice the memory
            self._layers.append(_fused(text_model.layers.pop(0)))
        self._last = _fused_last(text_model.layers.pop(0), self._num_heads)

    def forward(self, embeds_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows."""
        angles_FT = positions_3T.index_select(0, self._axis_F) * self._frequency_F[:, None]
        turns_TF = torch.polar(self._rotary_scale, angles_FT.t())
        hidden = Hidden.of(embeds_TD, self._epsilon)
        tiles = hidden.tiles(_TILE_ROWS)
        for index, layer in enumerate(self._layers):
            if len(embeds_TD) >= _MANY_ROWS:
                self.between_parts()
            attended_TX = self._attended(index, hidden, turns_TF, plan)
            for tile, attended in zip(tiles, torch.split(attended_TX, _TILE_ROWS), strict=True):
                layer.outputs.add(tile, attended)
        if len(embeds_TD) >= _MANY_ROWS:
            self.between_parts()
        states: torch.Tensor = self._last_states(hidden, turns_TF, plan).normed() * self._norm_weight_D
        return states

    def _attended(self, index: int, hidden: Hidden, turns_TF: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[T, N * H]."""
        qkv_TXH = self._heads(self._layers[index].qkv.product(hidden.normed()))
        turn(qkv_TXH[:, : self._num_turned], turns_TF)
        query_TNH, kv_T2KH = qkv_TXH.tensor_split((self._num_heads,), 1)
        return attend(plan, index, plan.parts, query_TNH, kv_T2KH, self._scale)

    def _last_states(self, hidden: Hidden, turns_TF: torch.Tensor, plan: BatchPlan) -> Hidden:
        """Of [R], after the last layer."""
        normed_TD, rows = hidden.normed(), plan.last_rows
        kv_T2KH = self._heads(self._last.kv.product(normed_TD))
        turn(kv_T2KH[:, : self._num_turned - self._num_heads], turns_TF)
        if rows is not None:
            hidden, normed_TD, turns_TF = hidden.rows(rows), normed_TD[rows], turns_TF[rows]
        query_RNH = self._heads(self._last.query.product(normed_TD))
        turn(query_RNH, turns_TF)
        attended_RX = attend(plan, len(self._layers), plan.last_parts, query_RNH, kv_T2KH, self._scale)
        self._last.outputs.add(hidden, attended_RX)
        return hidden

    def _heads(self, outputs_TO: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(outputs_TO, 1, (-1, self._head_size))


def _fused(layer: Any) -> _Layer:
    return _Layer(make_weight(*_qkv(layer)), _outputs(layer))


def _fused_last(layer: Any, num_heads: int) -> _LastLayer:
    (query, kv), (query_bias, kv_bias) = (
        tensor.tensor_split((num_heads * layer.self_attn.head_dim,)) for tensor in _qkv(layer)
    )
    return _LastLayer(make_weight(query, query_bias), make_weight(kv, kv_bias), _outputs(layer))


def _qkv(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias."""
    attention = layer.self_attn
    q, k, v, head_size = attention.q_proj, attention.k_proj, attention.v_proj, attention.head_dim
    weight = torch.cat((interleaved(q.weight, head_size), interleaved(k.weight, head_size), v.weight))
    bias = torch.cat((interleaved(q.bias, head_size), interleaved(k.bias, head_size), v.bias))
    return times_norm(weight, layer.input_layernorm.weight), bias


def _outputs(layer: Any) -> Outputs:
    return Outputs.of(layer.self_attn.o_proj, layer.mlp, layer.post_attention_layernorm.weight)
