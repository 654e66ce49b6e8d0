"""Weights of a layer and the products with them: as torch's matrices, or as oneDNN packs them.

A decode step is a few rows times every weight. For 2 to 32 rows MKL takes more time than memory needs; oneDNN, with a weight
that was packed for it beforehand, took 0.5 to 0.9 of it (measured; one row and one thread: 1.2, hundreds of rows: 0.9 to 1.15).
Shapes: T rows, D inputs, O outputs, which are P parts of W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_SPARE_OUTPUTS = 16  # 64 bytes of float32, one line of a cache
# Measured: with a weight that stays in a core's cache, a product of few rows is over before oneDNN has begun
_MIN_PACKED = 2**18
_PACKED_FOR_ROWS = 16  # a hint, which makes no difference that could be measured
_PLAIN: tuple[str, list[float], str] = ("none", [], "")  # of oneDNN's product: what else is done with the outputs


class Weight(Protocol):
    """With a bias, or none."""

    def split(self, num_outputs: int) -> tuple[Weight, Weight]:
        """Its first outputs, and the others."""
        ...

    def empty(self, num_rows: int) -> torch.Tensor:
        """[P, T, W], in the order in which `product` fills it."""
        ...

    def product(self, rows_TD: torch.Tensor, out_PTW: torch.Tensor | None = None) -> torch.Tensor:
        """[P, T, W], in out_PTW when given: what `empty` gave, perhaps when there were more threads."""
        ...

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        """Add it to others, in place."""
        ...


MakeWeight = Callable[[torch.Tensor, int, torch.Tensor | None], Weight]


def dense_weight(weight_OD: torch.Tensor, num_part_outputs: int, bias_O: torch.Tensor | None = None) -> Weight:
    """For many rows at a time."""
    return DenseWeight(laid_out(weight_OD), num_part_outputs, bias_O)


def weight_for_few_rows(weight_OD: torch.Tensor, num_part_outputs: int, bias_O: torch.Tensor | None = None) -> Weight:
    """For few rows at a time more often than for many: packed, where that pays."""
    make = PackedWeight if pays_to_pack(weight_OD) else dense_weight
    return make(weight_OD, num_part_outputs, bias_O)


def pays_to_pack(weight_OD: torch.Tensor) -> bool:
    """Where the products are mostly with few rows, and oneDNN can be had."""
    is_float_on_cpu = weight_OD.device.type == "cpu" and weight_OD.dtype == torch.float32
    return is_float_on_cpu and weight_OD.numel() >= _MIN_PACKED and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def laid_out(weight_OD: torch.Tensor) -> torch.Tensor:
    """[D, O], as torch.mm takes it: of a transposed weight, a product with few rows took up to a third longer (measured, MKL).
    On a CPU its rows are further apart than they are long: what lies a power of two apart shares few places in a core's
    caches (measured for 1, 8 and 32 rows: products took 0.95, 0.91 and 0.91 of the time)."""
    num_outputs, num_inputs = weight_OD.shape
    num_spare = _SPARE_OUTPUTS if weight_OD.device.type == "cpu" else 0
    return weight_OD.new_empty(num_inputs, num_outputs + num_spare)[:, :num_outputs].copy_(weight_OD.t())


class DenseWeight:
    """Implements Weight; products go in parts where threads share them.

    MKL makes poor use of two threads for few rows times many outputs, but shares the parts of a batched product out among them
    well: measured for 2 to 128 rows, that took 0.6 to 0.8 of the time, though up to 1.3 with one thread.

    Args:
        weight_DO: as `laid_out` gives it.
    """

    def __init__(self, weight_DO: torch.Tensor, num_part_outputs: int, bias_O: torch.Tensor | None = None) -> None:
        self._weight_DO = weight_DO
        self._bias_O = bias_O
        self._num_part_outputs = num_part_outputs
        self._parts_PDW = torch.unflatten(weight_DO, 1, (-1, num_part_outputs)).transpose(0, 1)
        self._bias_P1W = None if bias_O is None else bias_O.view(-1, 1, num_part_outputs)

    def split(self, num_outputs: int) -> tuple[DenseWeight, DenseWeight]:
        weights, biases = self._weight_DO.tensor_split((num_outputs,), 1), _split_bias(self._bias_O, num_outputs)
        first, second = (DenseWeight(w, self._num_part_outputs, b) for w, b in zip(weights, biases, strict=True))
        return first, second

    def empty(self, num_rows: int) -> torch.Tensor:
        num_parts, _, num_outputs = self._parts_PDW.shape
        if num_parts > 1 and num_rows > 1 and torch.get_num_threads() > 1:
            return self._weight_DO.new_empty(num_parts, num_rows, num_outputs)
        return self._weight_DO.new_empty(num_rows, num_parts, num_outputs).transpose(0, 1)

    def product(self, rows_TD: torch.Tensor, out_PTW: torch.Tensor | None = None) -> torch.Tensor:
        if out_PTW is None:
            out_PTW = self.empty(len(rows_TD))
        if len(rows_TD) > 1 and len(out_PTW) > 1 and out_PTW.is_contiguous():
            rows_PTD = rows_TD.expand(len(self._parts_PDW), -1, -1)
            if self._bias_P1W is None:
                return torch.bmm(rows_PTD, self._parts_PDW, out=out_PTW)
            return torch.baddbmm(self._bias_P1W, rows_PTD, self._parts_PDW, out=out_PTW)
        out_TO = out_PTW.transpose(0, 1).flatten(1)
        if self._bias_O is None:
            torch.mm(rows_TD, self._weight_DO, out=out_TO)
        else:
            torch.addmm(self._bias_O, rows_TD, self._weight_DO, out=out_TO)
        return out_PTW

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        if self._bias_O is not None:
            to_TO.add_(self._bias_O)
        to_TO.addmm_(rows_TD, self._weight_DO)


class PackedWeight:
    """Implements Weight: float32 on a CPU, in blocks that suit oneDNN's kernels, and nowhere else."""

    def __init__(self, weight_OD: torch.Tensor, num_part_outputs: int, bias_O: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD, _PACKED_FOR_ROWS)
        self._bias_O = bias_O
        self._num_outputs = len(weight_OD)
        self._num_part_outputs = num_part_outputs

    def split(self, num_outputs: int) -> tuple[PackedWeight, PackedWeight]:
        weights, biases = self._packed.to_dense().tensor_split((num_outputs,)), _split_bias(self._bias_O, num_outputs)
        first, second = (PackedWeight(w, self._num_part_outputs, b) for w, b in zip(weights, biases, strict=True))
        return first, second

    def empty(self, num_rows: int) -> torch.Tensor:
        return self._in_parts(torch.empty(num_rows, self._num_outputs))

    def product(self, rows_TD: torch.Tensor, out_PTW: torch.Tensor | None = None) -> torch.Tensor:
        found_PTW = self._in_parts(torch.ops.mkldnn._linear_pointwise(rows_TD, self._packed, self._bias_O, *_PLAIN))
        return found_PTW if out_PTW is None else out_PTW.copy_(found_PTW)

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        to_TO.add_(torch.ops.mkldnn._linear_pointwise(rows_TD, self._packed, self._bias_O, *_PLAIN))

    def _in_parts(self, outputs_TO: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(outputs_TO, 1, (-1, self._num_part_outputs)).transpose(0, 1)


def _split_bias(bias_O: torch.Tensor | None, num_outputs: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if bias_O is None:
        return None, None
    first, second = bias_O.tensor_split((num_outputs,))
    return first, second
