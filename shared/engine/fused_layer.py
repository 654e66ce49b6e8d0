"""What the fused layers of text and of pictures have in common: norms, rotary turns, and what follows attention.

The norms' weights are multiplied into those of the products after them. A head's halves are interleaved, so that a rotary
turn is a product of complex numbers, in place. Used by fused_text.py and fused_vision.py.
Shapes: T tokens (patches of a picture), D model, S = D and what is beside it, X heads, H head size, F = H / 2 frequencies,
I inner size of the MLP, O outputs; P parts of W outputs (see weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad, silu

from triptych.shared.engine.weights import MakeWeight, Weight

_SPARE_STATES = 16  # of a token, beside its hidden state: one for the norm, the others keep rows at 64 bytes in float32
_MAX_PART_OUTPUTS = 128  # measured on a CPU, 64 to 256


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

    def normed(self) -> torch.Tensor:
        """Root mean square norm without weight, [T, D], short of a factor of sqrt(D), which is in the weights."""
        norm_T1 = torch.linalg.vector_norm(self.states_TS, dim=-1, keepdim=True, dtype=torch.float32)
        normed_TD: torch.Tensor = self.hidden_TD / norm_T1
        return normed_TD.to(self.hidden_TD.dtype)


class Turning:
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


@dataclass(frozen=True, slots=True)
class Outputs:
    """What follows attention: its output [N * H to D], then the MLP. gate_up: gates first. down: [I to D]."""

    output: Weight
    gate_up: Weight
    down: Weight
    inner_size: int

    @classmethod
    def of(cls, projection: Any, mlp: Any, norm_D: torch.Tensor, make: MakeWeight) -> Outputs:
        """From modules: attention's last, and the MLP with the weight of the norm before it."""
        gates, ups, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        bias = None if gates.bias is None else torch.cat((gates.bias, ups.bias))
        return cls(
            output=make(projection.weight, len(projection.weight), projection.bias),
            gate_up=make(times_norm(torch.cat((gates.weight, ups.weight)), norm_D), _part_size(gates.weight), bias),
            down=make(down.weight, len(down.weight), down.bias),
            inner_size=len(gates.weight),
        )

    def add(self, hidden: Hidden, attended_TX: torch.Tensor, gates: Gates) -> None:
        """Add to the hidden states what is made of [T, N * H]."""
        self.output.add_product(attended_TX, hidden.hidden_TD)
        self.gate_up.product(hidden.normed(), gates.all_PTW)
        torch.mul(silu(gates.gate_PTW, inplace=True), gates.up_PTW, out=gates.product_PTW)
        self.down.add_product(gates.product_TI, hidden.hidden_TD)


class Gates:
    """What the MLP makes of some tokens' gates and ups, and views of it: made once for all layers and tiles of so many."""

    def __init__(self, num_tokens: int, outputs: Outputs) -> None:
        self.all_PTW = outputs.gate_up.empty(num_tokens)
        self.gate_PTW, self.up_PTW = self.all_PTW.chunk(2)
        self.product_TI = self.all_PTW.new_empty(num_tokens, outputs.inner_size)
        self.product_PTW = torch.unflatten(self.product_TI, 1, (-1, self.gate_PTW.shape[-1])).transpose(0, 1)


def tiles(hidden: Hidden, outputs: Outputs, num_rows: int) -> list[tuple[Hidden, Gates]]:
    """Hidden states in tiles of num_rows, and what their gates go into, for all layers with outputs of that size."""
    parts = [Hidden(states_TS, hidden.hidden_TD.shape[1]) for states_TS in torch.split(hidden.states_TS, num_rows)]
    gates = {num_tokens: Gates(num_tokens, outputs) for num_tokens in {len(part.states_TS) for part in parts}}
    return [(part, gates[len(part.states_TS)]) for part in parts]


def nothing() -> None:
    """What is called between layers where nobody asked for anything."""


def interleaved(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """[number of heads * H, ...], of each head 0, F, 1, F + 1, ... instead of 0, 1, ..., F, F + 1, ..."""
    halves = heads.view(-1, 2, head_size // 2, *heads.shape[1:])
    return halves.transpose(1, 2).reshape(heads.shape)


def times_norm(weight_OD: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Weights for what `Hidden.normed` gives."""
    scaled_D: torch.Tensor = norm_D.float() * len(norm_D) ** 0.5
    return (weight_OD.float() * scaled_D).to(weight_OD.dtype)


def _part_size(gates_ID: torch.Tensor) -> int:
    num_gates = len(gates_ID)
    if gates_ID.device.type != "cpu":
        return num_gates
    return max(size for size in range(1, _MAX_PART_OUTPUTS + 1) if num_gates % size == 0)
