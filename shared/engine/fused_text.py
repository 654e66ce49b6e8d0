"""The text layers of a transformers model as few calls into torch: on a CPU a small model's step is mostly calls.

Query, key and value are one product, gate and up another; the norms' weights are multiplied into them; a head's halves are
interleaved, so that a rotary turn is a product of complex numbers, in place. Numbers equal the modules' but for rounding.
Shapes: T packed tokens, R rows asked for, D model, S = D and what is beside it, N query heads, K kv heads, X = N + 2K,
H head size, F = H / 2 frequencies; P parts of W outputs (see wide_weight.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, silu

from triptych.shared.engine.attention import attend
from triptych.shared.engine.batch_plan import BatchPlan
from triptych.shared.engine.wide_weight import WideWeight, laid_out

KEY_ORDER = "interleaved"  # of a head in the KV: blocks of modules, whose heads are in halves, don't fit
_LAYER_KINDS = ("Qwen2_5_VLDecoderLayer",)
_MOVING_ROPE_KINDS = ("dynamic", "longrope")  # their frequencies depend on how long a sequence is
_TILE_ROWS = 256  # measured: what the MLP works on at once stays in a core's cache, and in memory that malloc keeps
_SPARE_STATES = 16  # of a token, beside its hidden state: one for the norm, the others keep rows at 64 bytes in float32
_PART_OUTPUTS = 128  # measured on a CPU, 64 to 256


@dataclass(frozen=True, slots=True)
class _Layer:
    """qkv: a part for each head; gate_up: gates first. output [N * H, D], down [I, D]: as torch.mm takes them."""

    qkv: WideWeight
    output: torch.Tensor
    gate_up: WideWeight
    down: torch.Tensor


class _Hidden:
    """Hidden states of some tokens, changed in place. states_TS: followed by what keeps their norm from zero, then zeros."""

    def __init__(self, states_TS: torch.Tensor, size: int) -> None:
        self.states_TS = states_TS
        self.hidden_TD = states_TS[:, :size]

    def normed(self) -> torch.Tensor:
        """Root mean square norm without weight, [T, D], short of a factor of sqrt(D), which is in the weights."""
        norm_T1 = torch.linalg.vector_norm(self.states_TS, dim=-1, keepdim=True, dtype=torch.float32)
        normed_TD: torch.Tensor = self.hidden_TD / norm_T1
        return normed_TD.to(self.hidden_TD.dtype)


class _Turning:
    """Any number of heads that get rotary turns, in place: products of complex numbers, in float32."""

    def __init__(self, heads_XTH: torch.Tensor) -> None:
        self._heads_XTH = heads_XTH
        self._floats_XTH = heads_XTH.float()  # float32: no copy
        self._pairs_XTF = torch.view_as_complex(torch.unflatten(self._floats_XTH, -1, (-1, 2)))

    def turn(self, turns_TF: torch.Tensor) -> None:
        if self._floats_XTH is self._heads_XTH:
            self._pairs_XTF.mul_(turns_TF)
        else:
            self._floats_XTH.copy_(self._heads_XTH)
            self._pairs_XTF.mul_(turns_TF)
            self._heads_XTH.copy_(self._floats_XTH)


class _Heads:
    """What a layer's queries, keys and values are computed into, and views of it: made once for all layers."""

    def __init__(self, num_tokens: int, layer: _Layer, num_heads: int, num_turned: int) -> None:
        self.all_XTH = layer.qkv.empty(num_tokens)
        self.turned = _Turning(self.all_XTH[:num_turned])
        self.query_TNH, self.kv_T2KH = self.all_XTH.transpose(0, 1).tensor_split((num_heads,), 1)


class _Gates:
    """What the MLP makes of a tile's gates and ups, and views of it: made once for all layers and tiles of so many tokens."""

    def __init__(self, num_tokens: int, layer: _Layer) -> None:
        self.all_PTW = layer.gate_up.empty(num_tokens)
        self.gate_PTW, self.up_PTW = self.all_PTW.chunk(2)
        self.product_TI = self.all_PTW.new_empty(num_tokens, len(layer.down))
        self.product_PTW = torch.unflatten(self.product_TI, 1, (-1, self.gate_PTW.shape[-1])).transpose(0, 1)


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
        self._norm_floor: float = (len(weight) * norm.variance_epsilon) ** 0.5
        self._layers: list[_Layer] = []
        while text_model.layers:  # one at a time: both forms of all of them would take twice the memory
            self._layers.append(_fused(text_model.layers.pop(0)))
        self._last_query, self._last_kv = self._layers[-1].qkv.split(self._num_heads * self._head_size)

    def forward(self, embeds_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows."""
        angles_FT = positions_3T.index_select(0, self._axis_F) * self._frequency_F[:, None]
        turns_TF = torch.polar(self._rotary_scale, angles_FT.t())
        heads = _Heads(len(embeds_TD), self._layers[0], self._num_heads, self._num_turned)
        states_TS = pad(embeds_TD, (0, _SPARE_STATES))
        states_TS[:, embeds_TD.shape[1]] = self._norm_floor
        hidden = _Hidden(states_TS, embeds_TD.shape[1])
        tiles = self._tiles(hidden)
        for index, layer in enumerate(self._layers):
            if index == len(self._layers) - 1 and plan.last_rows is not None:
                attended = self._attended_last(index, hidden, turns_TF, plan)
                hidden = _Hidden(states_TS[plan.last_rows], embeds_TD.shape[1])
                tiles = self._tiles(hidden)
            else:
                attended = self._attended(index, hidden, turns_TF, plan, heads)
            for (tile, gates), attended_TX in zip(tiles, torch.split(attended, _TILE_ROWS), strict=True):
                _add_outputs(layer, tile, attended_TX, gates)
        states: torch.Tensor = hidden.normed() * self._norm_weight_D
        return states

    def _attended(self, index: int, hidden: _Hidden, turns_TF: torch.Tensor, plan: BatchPlan, heads: _Heads) -> torch.Tensor:
        """[T, N * H]."""
        self._layers[index].qkv.product(hidden.normed(), heads.all_XTH)
        heads.turned.turn(turns_TF)
        return attend(plan, index, plan.parts, heads.query_TNH, heads.kv_T2KH, self._scale)

    def _attended_last(self, index: int, hidden: _Hidden, turns_TF: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[R, N * H]: of other tokens than those asked for, only keys and values are wanted."""
        normed_TD = hidden.normed()
        query_NRH, kv_2KTH = self._last_query.product(normed_TD[plan.last_rows]), self._last_kv.product(normed_TD)
        _Turning(query_NRH).turn(turns_TF[plan.last_rows])
        _Turning(kv_2KTH[: self._num_turned - self._num_heads]).turn(turns_TF)
        return attend(plan, index, plan.last_parts, query_NRH.transpose(0, 1), kv_2KTH.transpose(0, 1), self._scale)

    def _tiles(self, hidden: _Hidden) -> list[tuple[_Hidden, _Gates]]:
        tiles = [_Hidden(states_TS, hidden.hidden_TD.shape[1]) for states_TS in torch.split(hidden.states_TS, _TILE_ROWS)]
        sizes = {len(tile.states_TS) for tile in tiles}
        gates = {num_tokens: _Gates(num_tokens, self._layers[0]) for num_tokens in sizes}
        return [(tile, gates[len(tile.states_TS)]) for tile in tiles]


def _add_outputs(layer: _Layer, hidden: _Hidden, attended_TX: torch.Tensor, gates: _Gates) -> None:
    """What attention and then the MLP add to the hidden states."""
    hidden.hidden_TD.addmm_(attended_TX, layer.output)
    layer.gate_up.product(hidden.normed(), gates.all_PTW)
    torch.mul(silu(gates.gate_PTW, inplace=True), gates.up_PTW, out=gates.product_PTW)
    hidden.hidden_TD.addmm_(gates.product_TI, layer.down)


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
        qkv=WideWeight(laid_out(_times_norm(qkv, layer.input_layernorm.weight)), head_size, bias),
        output=laid_out(attention.o_proj.weight),
        gate_up=WideWeight(laid_out(gate_up), num_part_outputs),
        down=laid_out(mlp.down_proj.weight),
    )


def _interleaved(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """[number of heads * H, ...], of each head 0, F, 1, F + 1, ... instead of 0, 1, ..., F, F + 1, ..."""
    halves = heads.view(-1, 2, head_size // 2, *heads.shape[1:])
    return halves.transpose(1, 2).reshape(heads.shape)


def _times_norm(weight_OD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Weights for what `_Hidden.normed` gives."""
    scaled_D: torch.Tensor = norm_D.float() * len(norm_D) ** 0.5
    return (weight_OD.float() * scaled_D).to(weight_OD.dtype)
