"""A weight with many outputs, such as that of gates and ups together: a product with it goes in parts where threads share it.

MKL makes poor use of two threads for few rows times a wide weight, but shares the parts of a batched product out among them
well: measured for 2 to 128 rows, that took 0.6 to 0.8 of the time, though up to 1.3 with one thread.
Shapes: T rows, D inputs, O outputs, which are P parts of W.
"""

from __future__ import annotations

import torch

_SPARE_OUTPUTS = 16  # 64 bytes of float32, one line of a cache


def laid_out(weight_OD: torch.Tensor) -> torch.Tensor:
    """[D, O], as torch.mm takes it: of a transposed weight, a product with few rows took up to a third longer (measured, MKL).
    On a CPU its rows are further apart than they are long: what lies a power of two apart shares few places in a core's
    caches (measured for 1, 8 and 32 rows: products took 0.95, 0.91 and 0.91 of the time)."""
    num_outputs, num_inputs = weight_OD.shape
    num_spare = _SPARE_OUTPUTS if weight_OD.device.type == "cpu" else 0
    return weight_OD.new_empty(num_inputs, num_outputs + num_spare)[:, :num_outputs].copy_(weight_OD.t())


class WideWeight:
    """With a bias, or none. weight_DO: as `laid_out` gives it."""

    def __init__(self, weight_DO: torch.Tensor, num_part_outputs: int, bias_O: torch.Tensor | None = None) -> None:
        self._weight_DO = weight_DO
        self._bias_O = bias_O
        self._num_part_outputs = num_part_outputs
        self._parts_PDW = torch.unflatten(weight_DO, 1, (-1, num_part_outputs)).transpose(0, 1)
        self._bias_P1W = None if bias_O is None else bias_O.view(-1, 1, num_part_outputs)

    def split(self, num_outputs: int) -> tuple[WideWeight, WideWeight]:
        """Views: its first outputs, and the others."""
        weights = self._weight_DO.tensor_split((num_outputs,), 1)
        biases = (None, None) if self._bias_O is None else self._bias_O.tensor_split((num_outputs,))
        first, second = (WideWeight(w, self._num_part_outputs, b) for w, b in zip(weights, biases, strict=True))
        return first, second

    def empty(self, num_rows: int) -> torch.Tensor:
        """[P, T, W], in the order in which `product` fills it."""
        num_parts, _, num_outputs = self._parts_PDW.shape
        if _goes_in_parts(num_rows):
            return self._weight_DO.new_empty(num_parts, num_rows, num_outputs)
        return self._weight_DO.new_empty(num_rows, num_parts, num_outputs).transpose(0, 1)

    def product(self, rows_TD: torch.Tensor, out_PTW: torch.Tensor | None = None) -> torch.Tensor:
        """[P, T, W], in out_PTW when given: what `empty` gave, perhaps when there were more threads."""
        if out_PTW is None:
            out_PTW = self.empty(len(rows_TD))
        if len(rows_TD) > 1 and out_PTW.is_contiguous():
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


def _goes_in_parts(num_rows: int) -> bool:
    return num_rows > 1 and torch.get_num_threads() > 1
