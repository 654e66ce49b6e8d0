"""The text layers of a transformers model as few calls into torch: on a CPU a small model's step is mostly calls.

Query, key and value are one product, gate and up another; the norms' weights are multiplied into them; a head's halves are
interleaved, so that a rotary turn is a product of complex numbers, in place. Numbers equal the modules' but for rounding.
Shapes: T packed tokens, R rows asked for, D model, N query heads, K kv heads, X = N + 2K, H head size, F = H / 2 frequencies;
P parts of W outputs (see wide_weight.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from triptych.shared.engine.attention import attend
from triptych.shared.engine.batch_plan import BatchPlan
from triptych.shared.engine.wide_weight import WideWeight

KEY_ORDER = "interleaved"  # of a head in the KV: blocks of modules, whose heads are in halves, don't fit
_LAYER_KINDS = ("Qwen2_5_VLDecoderLayer",)
_MOVING_ROPE_KINDS = ("dynamic", "longrope")  # their frequencies depend on how long a sequence is
_TILE_ROWS = 256  # measured: what the MLP works on at once stays in a core's cache, and in memory that malloc keeps
_PART_OUTPUTS = 128  # measured on a CPU, 64 to 256


@dataclass(frozen=True, slots=True)
class _Layer:
    """qkv: a part for each head; gate_up: gates first. output [N * H, D], down [I, D]: as torch.mm takes them."""

    qkv: WideWeight
    output: torch.Tensor
    gate_up: WideWeight
    down: torch.Tensor


class _Heads:
    """What a layer's queries, keys and values are computed into, and views of it: made once for all layers."""

    def __init__(self, num_tokens: int, layer: _Layer, num_heads: int, num_turned: int) -> None:
        self.all_XTH = layer.qkv.empty(num_tokens)
        self.turned_XTH = self.all_XTH[:num_turned]
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
        self._norm_floor = torch.tensor((len(weight) * norm.variance_epsilon) ** 0.5, device=weight.device)
        self._layers: list[_Layer] = []
        while text_model.layers:  # one at a time: both forms of all of them would take twice the memory
            self._layers.append(_fused(text_model.layers.pop(0)))
        self._last_query, self._last_kv = self._layers[-1].qkv.split(self._num_heads * self._head_size)

    def forward(self, hidden_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows. hidden_TD, the embeddings, is overwritten."""
        angles_FT = positions_3T.index_select(0, self._axis_F) * self._frequency_F[:, None]
        turns_TF = torch.polar(self._rotary_scale, angles_FT.t())
        heads = _Heads(len(hidden_TD), self._layers[0], self._num_heads, self._num_turned)
        for index, layer in enumerate(self._layers):
            if index == len(self._layers) - 1 and plan.last_rows is not None:
                attended = self._attended_last(index, hidden_TD, turns_TF, plan)
                hidden_TD = hidden_TD[plan.last_rows]
            else:
                attended = self._attended(index, hidden_TD, turns_TF, plan, heads)
            for begin in range(0, len(hidden_TD), _TILE_ROWS):
                tile = slice(begin, begin + _TILE_ROWS)
                self._add_outputs(layer, hidden_TD[tile], attended[tile])
        states: torch.Tensor = self._normed(hidden_TD) * self._norm_weight_D
        return states

    def _attended(
        self, index: int, hidden_TD: torch.Tensor, turns_TF: torch.Tensor, plan: BatchPlan, heads: _Heads
    ) -> torch.Tensor:
        """[T, N * H]."""
        layer = self._layers[index]
        layer.qkv.product(self._normed(hidden_TD), heads.all_XTH)
        _turn(heads.turned_XTH, turns_TF)
        return attend(plan, index, plan.parts, heads.query_TNH, heads.kv_T2KH, self._scale)

    def _attended_last(self, index: int, hidden_TD: torch.Tensor, turns_TF: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[R, N * H]: of other tokens than those asked for, only keys and values are wanted."""
        normed_TD = self._normed(hidden_TD)
        query_NRH, kv_2KTH = self._last_query.product(normed_TD[plan.last_rows]), self._last_kv.product(normed_TD)
        _turn(query_NRH, turns_TF[plan.last_rows])
        _turn(kv_2KTH[: self._num_turned - self._num_heads], turns_TF)
        return attend(plan, index, plan.last_parts, query_NRH.transpose(0, 1), kv_2KTH.transpose(0, 1), self._scale)

    def _add_outputs(self, layer: _Layer, hidden_TD: torch.Tensor, attended_TX: torch.Tensor) -> None:
        """What attention and then the MLP add to the hidden states, in place."""
        hidden_TD.addmm_(attended_TX, layer.output)
        gate_PTW, up_PTW = layer.gate_up.product(self._normed(hidden_TD)).chunk(2)
        hidden_TD.addmm_(silu(gate_PTW, inplace=True).mul_(up_PTW).transpose(0, 1).flatten(1), layer.down)

    def _normed(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Root mean square norm without weight, short of a factor of sqrt(D), which is in the weights."""
        norm_T1 = torch.linalg.vector_norm(hidden_TD, dim=-1, keepdim=True, dtype=torch.float32)
        return (hidden_TD / torch.hypot(norm_T1, self._norm_floor)).to(hidden_TD.dtype)


def _turn(heads_XTH: torch.Tensor, turns_TF: torch.Tensor) -> None:
    """Rotary turn, in place, of any number of heads."""
    pairs = heads_XTH.float().view(*heads_XTH.shape[:2], heads_XTH.shape[-1] // 2, 2)  # float32: no copy
    torch.view_as_complex(pairs).mul_(turns_TF)
    if heads_XTH.dtype != torch.float32:
        heads_XTH.copy_(pairs.flatten(2))


def _fused(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, head_size = attention.q_proj, attention.k_proj, attention.v_proj, attention.head_dim
    qkv = torch.cat((_interleaved(q.weight, head_size), _interleaved(k.weight, head_size), v.weight))
    bias = torch.cat((_interleaved(q.bias, head_size), _interleaved(k.bias, head_size), v.bias))
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    num_gates = len(gate_up) // 2
    num_part_outputs = math.gcd(_PART_OUTPUTS, num_gates) if gate_up.device.type == "cpu" else num_gates
    gate_up = _times_norm(gate_up, layer.post_attention_layernorm.weight)
    return _Layer(
        qkv=WideWeight(_times_norm(qkv, layer.input_layernorm.weight).t().contiguous(), head_size, bias),
        output=attention.o_proj.weight.t().contiguous(),
        gate_up=WideWeight(gate_up.t().contiguous(), num_part_outputs),
        down=mlp.down_proj.weight.t().contiguous(),
    )


def _interleaved(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """[number of heads * H, ...], of each head 0, F, 1, F + 1, ... instead of 0, 1, ..., F, F + 1, ..."""
    halves = heads.view(-1, 2, head_size // 2, *heads.shape[1:])
    return halves.transpose(1, 2).reshape(heads.shape)


def _times_norm(weight_OD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Weights for what `FusedText._normed` gives."""
    scaled_D: torch.Tensor = norm_D.float() * len(norm_D) ** 0.5
    return (weight_OD.float() * scaled_D).to(weight_OD.dtype)
