"""The text layers of a transformers model as few calls into torch: on a CPU a small model's step is mostly calls.

Query, key and value are one product, gate and up another; the norms' weights are multiplied into them; a head's halves are
interleaved, so that a rotary turn is a product of complex numbers, in place. Numbers equal the modules' but for rounding.
Shapes: T packed tokens, R rows asked for, D model, N query heads, K kv heads, H head size, F = H / 2 frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from triptych.shared.engine.attention import attend
from triptych.shared.engine.batch_plan import BatchPlan

KEY_ORDER = "interleaved"  # of a head in the KV: blocks of modules, whose heads are in halves, don't fit
_LAYER_KINDS = ("Qwen2_5_VLDecoderLayer",)
_MOVING_ROPE_KINDS = ("dynamic", "longrope")  # their frequencies depend on how long a sequence is
_TILE_ROWS = 256  # measured: what the MLP works on at once stays in a core's cache, and in memory that malloc keeps


@dataclass(frozen=True, slots=True)
class _Layer:
    """As torch.mm takes them: qkv [D, (N + 2K) * H], output [N * H, D], gate_up [D, 2 * I], down [I, D]. They lie in memory
    that way: of a transposed weight, a product with few rows took up to a third longer (measured, MKL)."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


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

    def forward(self, hidden_TD: torch.Tensor, positions_3T: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Hidden states [R, D] of plan.last_rows. hidden_TD, the embeddings, is overwritten."""
        angles_FT = positions_3T.index_select(0, self._axis_F) * self._frequency_F[:, None]
        turns_T1F = torch.polar(self._rotary_scale, angles_FT.t())[:, None]
        for index, layer in enumerate(self._layers):
            if index == len(self._layers) - 1 and plan.last_rows is not None:
                attended = self._attended_last(index, hidden_TD, turns_T1F, plan)
                hidden_TD = hidden_TD[plan.last_rows]
            else:
                attended = self._attended(index, hidden_TD, turns_T1F, plan)
            for begin in range(0, len(hidden_TD), _TILE_ROWS):
                tile = slice(begin, begin + _TILE_ROWS)
                self._add_outputs(layer, hidden_TD[tile], attended[tile])
        states: torch.Tensor = self._normed(hidden_TD) * self._norm_weight_D
        return states

    def _attended(self, index: int, hidden_TD: torch.Tensor, turns_T1F: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[T, N * H]."""
        layer = self._layers[index]
        qkv = torch.addmm(layer.qkv_bias, self._normed(hidden_TD), layer.qkv)
        heads = qkv.view(len(qkv), -1, self._head_size)
        self._turn(heads[:, : self._num_turned], turns_T1F)
        return attend(plan, index, plan.parts, heads[:, : self._num_heads], heads[:, self._num_heads :], self._scale)

    def _attended_last(self, index: int, hidden_TD: torch.Tensor, turns_T1F: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """[R, N * H]: of other tokens than those asked for, only keys and values are wanted."""
        layer, size, normed_TD = self._layers[index], self._num_heads * self._head_size, self._normed(hidden_TD)
        query = torch.addmm(layer.qkv_bias[:size], normed_TD[plan.last_rows], layer.qkv[:, :size])
        query_RNH = query.view(len(query), self._num_heads, self._head_size)
        kv = torch.addmm(layer.qkv_bias[size:], normed_TD, layer.qkv[:, size:])
        kv_T2KH = kv.view(len(kv), -1, self._head_size)
        self._turn(query_RNH, turns_T1F[plan.last_rows])
        self._turn(kv_T2KH[:, : self._num_turned - self._num_heads], turns_T1F)
        return attend(plan, index, plan.last_parts, query_RNH, kv_T2KH, self._scale)

    def _add_outputs(self, layer: _Layer, hidden_TD: torch.Tensor, attended_TX: torch.Tensor) -> None:
        """What attention and then the MLP add to the hidden states, in place."""
        hidden_TD.addmm_(attended_TX, layer.output)
        gate, up = torch.mm(self._normed(hidden_TD), layer.gate_up).chunk(2, -1)
        hidden_TD.addmm_(silu(gate, inplace=True).mul_(up), layer.down)

    def _normed(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Root mean square norm without weight, short of a factor of sqrt(D), which is in the weights."""
        norm_T1 = torch.linalg.vector_norm(hidden_TD, dim=-1, keepdim=True, dtype=torch.float32)
        return (hidden_TD / torch.hypot(norm_T1, self._norm_floor)).to(hidden_TD.dtype)

    def _turn(self, heads_TXH: torch.Tensor, turns_T1F: torch.Tensor) -> None:
        """Rotary turn, in place, of any number of heads."""
        pairs = heads_TXH.float().view(*heads_TXH.shape[:2], self._head_size // 2, 2)  # float32: no copy
        torch.view_as_complex(pairs).mul_(turns_T1F)
        if heads_TXH.dtype != torch.float32:
            heads_TXH.copy_(pairs.flatten(2))


def _fused(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, head_size = attention.q_proj, attention.k_proj, attention.v_proj, attention.head_dim
    qkv = torch.cat((_interleaved(q.weight, head_size), _interleaved(k.weight, head_size), v.weight))
    bias = torch.cat((_interleaved(q.bias, head_size), _interleaved(k.bias, head_size), v.bias))
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    return _Layer(
        qkv=_times_norm(qkv, layer.input_layernorm.weight).t().contiguous(),
        qkv_bias=bias,
        output=attention.o_proj.weight.t().contiguous(),
        gate_up=_times_norm(gate_up, layer.post_attention_layernorm.weight).t().contiguous(),
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
