"""How tensors move between instances: the producer stores a tensor under a lease, the consumer pulls it by its TensorRef.

Control messages (PullRequest, PullDone, PairRequest) go through `ControlPlane`, which the bus implements; bytes go through
shared memory or torch.distributed, never through the bus. All methods are for the event loop; copies run in threads.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import (
    Accepted,
    InstanceId,
    Message,
    PairRequest,
    PullDone,
    PullReply,
    PullRequest,
    Reply,
    RequestId,
    TensorId,
    TensorRef,
)

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

Buffer = bytes | bytearray | mmap.mmap


class ControlPlane(Protocol):
    """Carries control messages to one instance."""

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        """Raises InstanceLost when nobody answers there, DeadlineExceeded after timeout_s, or the error it answered."""
        ...

    async def publish(self, instance_id: InstanceId, message: Message) -> None: ...


class Transport(Protocol):
    """One instance's side: its store of leased tensors, and pulls from others."""

    address: TransportAddress

    async def put(self, tensor: torch.Tensor, request_id: RequestId, lease_s: float) -> TensorRef:
        """Copy a tensor into the store.

        Raises:
            Overloaded: the store stays full (it refuses, never grows).
        """
        ...

    async def put_bytes(self, data: Buffer, shape: tuple[int, ...], request_id: RequestId, lease_s: float) -> TensorRef:
        """Copy bytes into the store, as a uint8 tensor. Raises as `put` does."""
        ...

    async def put_lazy(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        request_id: RequestId,
        lease_s: float,
        materialize: Callable[[torch.Tensor], None],
        on_release: Callable[[], None],
    ) -> TensorRef:
        """Lease a tensor that is only written (by materialize, in the engine thread's stead: it is called from a worker
        thread with the destination) when somebody pulls it. on_release is called exactly once, on the event loop, when the
        lease ends for whatever reason. Takes room in the store only while it is pulled."""
        ...

    async def put_kept(
        self, tensor: torch.Tensor, request_id: RequestId, lease_s: float, on_release: Callable[[], None]
    ) -> TensorRef:
        """Lease a tensor that the caller keeps and doesn't write to until on_release: as put_lazy, but `get` gives it, too."""
        ...

    async def pull(
        self,
        ref: TensorRef,
        peer: TransportAddress,
        timeout_s: float,
        release: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensor's bytes in memory of our own (`out`, when given: contiguous, of the ref's shape and dtype); release
        drops it at its owner. After a failed or cancelled pull `out` may still be written to: use another one.

        Raises:
            InstanceLost: the owner is gone, or no longer holds it (code tensor_gone).
            DeadlineExceeded: it took longer than timeout_s.
            InternalError: ref, out and what is stored contradict each other (code tensor_mismatch).
            Overloaded: too many transfers at once, or the owner has no room for a lazy tensor.
        """
        ...

    def get(self, ref: TensorRef) -> torch.Tensor:
        """One of our own tensors (put or put_kept, not put_lazy) without copying, valid until its lease ends, not to be
        written.

        Raises:
            InstanceLost: code tensor_gone: it is no longer held.
        """
        ...

    def release(self, tensor_id: TensorId) -> None:
        """Drop one of our own tensors. Idempotent."""
        ...

    def release_request(self, request_id: RequestId) -> None:
        """Drop all of our own tensors of a request. Idempotent."""
        ...

    async def on_pull(self, message: PullRequest) -> PullReply: ...

    def on_pull_done(self, message: PullDone) -> None: ...

    async def on_pair(self, message: PairRequest) -> Accepted: ...

    def forget_peer(self, instance_id: InstanceId) -> None:
        """A peer is gone: close its pair and drop transfers under way to it."""
        ...

    def usage(self) -> tuple[int, int, int]:
        """Bytes in use, capacity in bytes, leases held."""
        ...

    async def close(self) -> None: ...
