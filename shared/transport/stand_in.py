"""Tensors without bytes: what emulated instances hold and move. Shapes, bytes and room are counted as of real ones."""

from __future__ import annotations

import math
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from triptych.shared.messages import TensorId
from triptych.shared.transport.allocator import FirstFit
from triptych.shared.transport.memory import STAMP_BYTES

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    from collections.abc import Callable

    import torch


class _Bytes:
    """Has of torch.uint8 what is asked of a dtype."""

    itemsize = 1

    def __str__(self) -> str:
        return "uint8"


UINT8 = cast("torch.dtype", _Bytes())


@dataclass(frozen=True, slots=True)
class StandIn:
    """Has of a torch.Tensor, of bytes, what is asked of one that is only passed on. is_in_host_memory: not the
    accelerator's."""

    shape: tuple[int, ...]
    is_in_host_memory: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return UINT8

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def clone(self) -> StandIn:
        """The same: nothing that it holds can go."""
        return self

    def numpy(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Zeros: nobody computes with what a stand-in holds."""
        return np.zeros(self.shape, np.uint8)


class StandInMemory:
    """Implements `TensorMemory`. A stand-in is what its shape says, so nothing is kept."""

    def __init__(self, capacity_bytes: int) -> None:
        self.allocator = FirstFit(capacity_bytes)

    def allocate(self, num_bytes: int) -> int | None:
        start = self.allocator.allocate(STAMP_BYTES + num_bytes)
        return None if start is None else start + STAMP_BYTES

    def stamp(self, offset: int, tensor_id: TensorId, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """There is nothing to mark."""

    def free(self, offset: int) -> None:
        self.allocator.free(offset - STAMP_BYTES)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return stand_in(shape)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """There is nothing to copy."""

    def trim(self) -> None:
        """It has no pages."""

    def close(self) -> None:
        """It holds nothing."""


class AtOnce(Executor):
    """Runs calls where they are submitted: those on stand-ins take no time."""

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:  # type: ignore[override]
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def stand_in(shape: tuple[int, ...]) -> torch.Tensor:
    """Roles and stores are typed for torch's tensors, of which they use no more than a stand-in has."""
    return cast("torch.Tensor", StandIn(shape))


def stand_in_host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`HostContext.host_memory` of an emulated instance."""
    return cast("torch.Tensor", StandIn(shape, is_in_host_memory=True))
