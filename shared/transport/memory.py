"""Where a store keeps its tensors: `TensorMemory`, with bytes in arena.py and without any in stand_in.py.

Offsets are of a range's data. Each range has STAMP_BYTES before it that tell which tensor lies there. No torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from triptych.shared.errors import InternalError
from triptych.shared.messages import TensorId
from triptych.shared.transport.allocator import ALIGN_BYTES, FirstFit

if TYPE_CHECKING:  # only named: stores of emulated instances hold no torch tensors
    import torch

STAMP_BYTES = ALIGN_BYTES
INLINE_COPY_BYTES = 256 << 10  # chosen: about 30 us of copying, less than a hop to a thread and back
DTYPE_NAMES = frozenset(
    ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
)  # those that travel


class TensorMemory(Protocol):
    """Room for tensors, of one instance. allocator does its bookkeeping."""

    allocator: FirstFit

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of num_bytes of data, or None when there is no room."""
        ...

    def stamp(self, offset: int, tensor_id: TensorId, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Mark the data at offset as complete and of this tensor."""
        ...

    def free(self, offset: int) -> None:
        """Give back the range at offset."""
        ...

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What lies at offset, valid until it is freed."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of equal shape and dtype into one that `tensor` gave."""
        ...

    def trim(self) -> None:
        """Return what an idle memory does not need to the system."""
        ...

    def close(self) -> None: ...


def dtype_name(dtype: torch.dtype) -> str:
    """Name on the wire.

    Raises:
        InternalError: not a dtype that travels.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise InternalError(f"dtype {name} cannot be transferred", code="tensor_mismatch")
    return name


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    if any(size < 0 for size in shape):
        raise InternalError("a tensor's shape has a negative size", code="tensor_mismatch")
    return math.prod(shape) * dtype.itemsize
