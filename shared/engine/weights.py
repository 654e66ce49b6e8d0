"""Weights of a layer and the products with them: as torch's matrices, or as oneDNN packs them.

A decode step is a few rows times every weight. For 2 to 32 rows MKL takes more time than memory needs to bring the weight;
oneDNN, with a weight that was packed for it beforehand, took 0.5 to 0.9 of it, and also of the time for hundreds of rows 0.85
to 0.95 (measured; one row and one thread: up to 1.2). Shapes: T rows, D inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch

_SPARE_OUTPUTS = 16  # 64 bytes of float32, one line of a cache
# Measured, 2^17 and 2^18: with a weight that stays in a core's cache, a product of one row is over before oneDNN has begun
_MIN_PACKED = 2**17
_PACKED_FOR_ROWS = 16  # a hint, which makes no difference that could be measured
_PLAIN: tuple[str, list[float], str] = ("none", [], "")  # of oneDNN's product: what else is done with the outputs


class Weight(Protocol):
    """With a bias, or none."""

    def product(self, rows_TD: torch.Tensor) -> torch.Tensor:
        """[T, O], contiguous, the caller's to change."""
        ...

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        """Add it to others, in place."""
        ...


def make_weight(weight_OD: torch.Tensor, bias_O: torch.Tensor | None = None) -> Weight:
    """In the form whose products take the least time; a copy."""
    return PackedWeight(weight_OD, bias_O) if pays_to_pack(weight_OD) else DenseWeight(weight_OD, bias_O)


def pays_to_pack(weight_OD: torch.Tensor) -> bool:
    """Where it is large, and oneDNN can be had."""
    is_float_on_cpu = weight_OD.device.type == "cpu" and weight_OD.dtype == torch.float32
    return is_float_on_cpu and weight_OD.numel() >= _MIN_PACKED and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class DenseWeight:
    """Implements Weight: [D, O], as torch.mm takes it. Of a transposed weight, a product with few rows took up to a third
    longer (measured, MKL). On a CPU its rows are further apart than they are long: what lies a power of two apart shares few
    places in a core's caches (measured for 1, 8 and 32 rows: products took 0.95, 0.91 and 0.91 of the time)."""

    def __init__(self, weight_OD: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        num_outputs, num_inputs = weight_OD.shape
        num_spare = _SPARE_OUTPUTS if weight_OD.device.type == "cpu" else 0
        self._weight_DO = weight_OD.new_empty(num_inputs, num_outputs + num_spare)[:, :num_outputs].copy_(weight_OD.t())
        self._bias_O = bias_O

    def product(self, rows_TD: torch.Tensor) -> torch.Tensor:
        if self._bias_O is None:
            return torch.mm(rows_TD, self._weight_DO)
        return torch.addmm(self._bias_O, rows_TD, self._weight_DO)

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        if self._bias_O is not None:
            to_TO.add_(self._bias_O)
        to_TO.addmm_(rows_TD, self._weight_DO)


class PackedWeight:
    """Implements Weight: float32 on a CPU, in blocks that suit oneDNN's kernels, and nowhere else."""

    def __init__(self, weight_OD: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD, _PACKED_FOR_ROWS)
        self._bias_O = bias_O

    def product(self, rows_TD: torch.Tensor) -> torch.Tensor:
        product_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_TD, self._packed, self._bias_O, *_PLAIN)
        return product_TO

    def add_product(self, rows_TD: torch.Tensor, to_TO: torch.Tensor) -> None:
        to_TO.add_(self.product(rows_TD))
