"""What the fused layers of text and of pictures have in common: norms, rotary turns, and what follows attention.

The norms' weights are multiplied into those of the products after them. A head's halves are interleaved, so that a rotary
turn is a product of complex numbers, in place. Used by fused_text.py and fused_vision.py.
Shapes: T tokens (patches of a picture), D model, S = D and what is beside it, X heads, H head size, F = H / 2 frequencies,
I inner size of the MLP, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, silu

from triptych.shared.engine.weights import Weight, make_weight

_SPARE_STATES = 16  # of a token, beside its hidden state: one for the norm, the others keep rows at 64 bytes in float32


class Hidden:
    """Hidden states of some tokens, changed in place. states_TS: followed by what keeps their norm from zero, then zeros."""

    def __init__(self, states_TS: torch.Tensor, size: int) -> None:
        self.states_TS = states_TS
        self.hidden_TD = states_TS[:, :size]

    @classmethod
    def of(cls, embeds_TD: torch.Tensor, epsilon: float) -> Hidden:
        """A copy. epsilon: the norms'."""
        size = embeds_TD.shape[1]
        states_TS = pad(embeds_TD, (0, _SPARE_STATES))
        states_TS[:, size] = (size * epsilon) ** 0.5
        return cls(states_TS, size)

    def rows(self, index: torch.Tensor) -> Hidden:
        """A copy of some."""
        return Hidden(self.states_TS[index], self.hidden_TD.shape[1])

    def tiles(self, num_rows: int) -> list[Hidden]:
        """Views of so many at a time."""
        return [Hidden(states_TS, self.hidden_TD.shape[1]) for states_TS in torch.split(self.states_TS, num_rows)]

    def normed(self) -> torch.Tensor:
        """Root mean square norm without weight, [T, D], short of a factor of sqrt(D), which is in the weights."""
        norm_T1 = torch.linalg.vector_norm(self.states_TS, dim=-1, keepdim=True, dtype=torch.float32)
        normed_TD: torch.Tensor = self.hidden_TD / norm_T1
        return normed_TD.to(self.hidden_TD.dtype)


def turn(heads_TXH: torch.Tensor, turns_TF: torch.Tensor) -> None:
    """Rotary turns of any number of heads, in place: products of complex numbers, in float32."""
    floats_TXH = heads_TXH.float()  # float32: no copy
    torch.view_as_complex(torch.unflatten(floats_TXH, -1, (-1, 2))).mul_(turns_TF.unsqueeze(1))
    if floats_TXH is not heads_TXH:
        heads_TXH.copy_(floats_TXH)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What follows attention: its output [N * H to D], then the MLP. gate_up: gates first. down: [I to D]."""

    output: Weight
    gate_up: Weight
    down: Weight

    @classmethod
    def of(cls, projection: Any, mlp: Any, norm_D: torch.Tensor) -> Outputs:
        """From modules: attention's last, and the MLP with the weight of the norm before it."""
        gates, ups, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        bias = None if gates.bias is None else torch.cat((gates.bias, ups.bias))
        return cls(
            output=make_weight(projection.weight, projection.bias),
            gate_up=make_weight(times_norm(torch.cat((gates.weight, ups.weight)), norm_D), bias),
            down=make_weight(down.weight, down.bias),
        )

    def add(self, hidden: Hidden, attended_TX: torch.Tensor) -> None:
        """Add to the hidden states what is made of [T, N * H]."""
        self.output.add_product(attended_TX, hidden.hidden_TD)
        gates_TI, ups_TI = self.gate_up.product(hidden.normed()).chunk(2, dim=1)
        self.down.add_product(torch.mul(silu(gates_TI, inplace=True), ups_TI), hidden.hidden_TD)


def nothing() -> None:
    """What is called between parts of a pass where nobody asked for anything."""


def interleaved(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """[number of heads * H, ...], of each head 0, F, 1, F + 1, ... instead of 0, 1, ..., F, F + 1, ..."""
    halves = heads.view(-1, 2, head_size // 2, *heads.shape[1:])
    return halves.transpose(1, 2).reshape(heads.shape)


def times_norm(weight_OD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Weights for what `Hidden.normed` gives."""
    scaled_D: torch.Tensor = norm_D.float() * len(norm_D) ** 0.5
    return (weight_OD.float() * scaled_D).to(weight_OD.dtype)
