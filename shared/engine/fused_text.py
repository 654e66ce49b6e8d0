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
from triptych.shared.engine.fused_layer import Hidden, Outputs, Turning, interleaved, nothing, tiles, times_norm
from triptych.shared.engine.weights import Weight, weight_for_few_rows

KEY_ORDER = "interleaved"  # of a head in the KV: blocks of modules, whose heads are in halves, don't fit
_LAYER_KINDS = ("Qwen2_5_VLDecoderLayer",)
_MOVING_ROPE_KINDS = ("dynamic", "longrope")  # their frequencies depend on how long a sequence is
_MANY_ROWS = 64  # chosen: from here a pass takes long enough for something to change meanwhile
_TILE_ROWS = 256  # measured: what the MLP works on at once stays in a core's cache, and in memory that malloc keeps


@dataclass(frozen=True, slots=True)
class _Layer:
    """qkv: a part for each head."""

    qkv: Weight
    outputs: Outputs


class _Heads:
    """What a layer's queries, keys and values are computed into, and views of it: made once for all layers."""

    def __init__(self, num_tokens: int, layer: _Layer, num_heads: int, num_turned: int) -> None:
        self.all_XTH = layer.qkv.empty(num_tokens)
        self.turned = Turning(self.all_XTH[:num_turned])
        self.query_TNH, self.kv_T2KH = self.all_XTH.transpose(0, 1).tensor_split((num_heads,), 1)


def can_fuse(text_model: Any) -> bool:
    """Whether its layers are built like Qwen2.5's, with frequencies that stay."""
    config = text_model.config
    is_known = all(type(layer).__name__ in _LAYER_KINDS for layer in text_model.layers)
    return is_known and config.hidden_act == "silu" and text_model.rotary_emb.rope_type not in _MOVING_ROPE_KINDS


class FusedText:
    """The layers and the last norm of text_model, which is left without layers.

    Args:
        axis_F: int64, which of the three rotary positions (time, height, width) turns each frequency.

    between_layers: called where many tokens are computed.
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
        self.between_layers: Callable[[], None] = nothing
        self._layers: list[_Layer] = []
        while text_model.layers:  # one at a time: both forms of all of them would take twice the memory
            self._layers.append(_fused(text_model.layers.pop(0)))
        self._last_query, self._last_kv = self._layers[-1].qkv.split(self._num_heads * self._head_size)

    def forward(self, embeds_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows."""
        angles_FT = positions_3T.index_select(0, self._axis_F) * self._frequency_F[:, None]
        turns_TF = torch.polar(self._rotary_scale, angles_FT.t())
        heads = _Heads(len(embeds_TD), self._layers[0], self._num_heads, self._num_turned)
        hidden = Hidden.of(embeds_TD, self._epsilon)
        parts = tiles(hidden, self._layers[0].outputs, _TILE_ROWS)
        for index, layer in enumerate(self._layers):
            if len(embeds_TD) >= _MANY_ROWS:
                self.between_layers()
            if index == len(self._layers) - 1 and plan.last_rows is not None:
                attended = self._attended_last(index, hidden, turns_TF, plan)
                hidden = hidden.rows(plan.last_rows)
                parts = tiles(hidden, layer.outputs, _TILE_ROWS)
            else:
                attended = self._attended(index, hidden, turns_TF, plan, heads)
            for (tile, gates), attended_TX in zip(parts, torch.split(attended, _TILE_ROWS), strict=True):
                layer.outputs.add(tile, attended_TX, gates)
        states: torch.Tensor = hidden.normed() * self._norm_weight_D
        return states

    def _attended(self, index: int, hidden: Hidden, turns_TF: torch.Tensor, plan: BatchPlan, heads: _Heads) -> torch.Tensor:
        """[T, N * H]."""
        self._layers[index].qkv.product(hidden.normed(), heads.all_XTH)
        heads.turned.turn(turns_TF)
        return attend(plan, index, plan.parts, heads.query_TNH, heads.kv_T2KH, self._scale)

    def _attended_last(self, index: int, hidden: Hidden, turns_TF: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[R, N * H]: of other tokens than those asked for, only keys and values are wanted."""
        normed_TD = hidden.normed()
        query_NRH, kv_2KTH = self._last_query.product(normed_TD[plan.last_rows]), self._last_kv.product(normed_TD)
        Turning(query_NRH).turn(turns_TF[plan.last_rows])
        Turning(kv_2KTH[: self._num_turned - self._num_heads]).turn(turns_TF)
        return attend(plan, index, plan.last_parts, query_NRH.transpose(0, 1), kv_2KTH.transpose(0, 1), self._scale)


def _fused(layer: Any) -> _Layer:
    attention = layer.self_attn
    q, k, v, head_size = attention.q_proj, attention.k_proj, attention.v_proj, attention.head_dim
    weight = torch.cat((interleaved(q.weight, head_size), interleaved(k.weight, head_size), v.weight))
    bias = torch.cat((interleaved(q.bias, head_size), interleaved(k.bias, head_size), v.bias))
    qkv = weight_for_few_rows(times_norm(weight, layer.input_layernorm.weight), head_size, bias)
    norm_D = layer.post_attention_layernorm.weight
    return _Layer(qkv, Outputs.of(attention.o_proj, layer.mlp, norm_D, weight_for_few_rows))
