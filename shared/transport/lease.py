"""One leased tensor in the store: its deadline, where it lies, and the pulls that pin it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from triptych.shared.errors import InstanceLost, InternalError, Overloaded
from triptych.shared.messages import InstanceId, PullRequest, RequestId, TensorId
from triptych.shared.transport.memory import dtype_name

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

MAX_PULLS = 64  # chosen: pulls of one tensor at once; each is of another instance or a retry


class PullKey(NamedTuple):
    """One transfer of one tensor: transfer ids are the puller's own count."""

    puller: InstanceId
    transfer_id: int


@dataclass(slots=True, eq=False)
class Lease:
    """offset is None while a lazy tensor takes no room. kept: where it is copied from when it is pulled. pulls maps each
    transfer to the time at which it is given up. Once `ended` nobody can pull it any more; it is freed after its last pull."""

    tensor_id: TensorId
    request_id: RequestId
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    deadline_s: float = 0.0  # monotonic, set when it is stored
    offset: int | None = None
    materialize: Callable[[torch.Tensor], None] | None = None
    on_release: Callable[[], None] | None = None
    kept: torch.Tensor | None = None
    filling: asyncio.Task[None] | None = None
    pulls: dict[PullKey, float] = field(default_factory=dict)
    ended: bool = False

    def pin(self, message: PullRequest, until_s: float) -> PullKey:
        """Register a transfer, after checking that the puller expects what is here.

        Raises:
            InternalError: shape, dtype or size differ, or the transfer id is in use.
            Overloaded: too many pulls of this tensor.
        """
        expected = (message.shape, message.dtype, message.num_bytes)
        if expected != (self.shape, dtype_name(self.dtype), self.num_bytes):
            raise InternalError("the puller expects another shape, dtype or size than is stored", code="tensor_mismatch")
        key = PullKey(message.puller, message.transfer_id)
        if key in self.pulls:
            raise InternalError("a transfer id is in use twice", code="tensor_mismatch")
        if len(self.pulls) >= MAX_PULLS:
            raise Overloaded("too many pulls of one tensor", code="too_many_pulls")
        self.pulls[key] = until_s
        return key


def tensor_gone() -> InstanceLost:
    """The typed miss: redo the stage that made the tensor."""
    return InstanceLost("a tensor is no longer held by its owner", code="tensor_gone")
