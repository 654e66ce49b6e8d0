"""Leased tensors of one instance, in its memory: bounded, refuses when full, frees after the last pull.

A lease ends by release (PullDone's, too), by its request's release, or by expiry; its room is freed at once, or, when
it is being pulled, after the last of its pulls is done, given up by deadline, or dropped with its puller. Loop-only:
copies run in `copies` threads, materialize in `writers` (it may wait for an engine), everything else on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from triptych.shared.errors import DeadlineExceeded, InternalError, Overloaded, TriptychError
from triptych.shared.messages import InstanceId, PullRequest, RequestId, TensorId, TensorRef
from triptych.shared.transport.lease import Lease, PullKey, tensor_gone
from triptych.shared.transport.memory import INLINE_COPY_BYTES, TensorMemory, dtype_name, num_bytes_of
from triptych.shared.transport.room import Room

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

PUT_WAIT_S = 5.0  # chosen: longer than a consumer takes to pull, shorter than a client's patience
MAX_LEASES = 65_536  # chosen: bounds what zero-size and lazy tensors, which take no room, can use

log = logging.getLogger(__name__)


class TensorStore:
    """See the module. `transfer_timeout_s` bounds how long any pull may pin a tensor."""

    def __init__(
        self, owner: InstanceId, memory: TensorMemory, copies: Executor, writers: Executor, transfer_timeout_s: float
    ) -> None:
        self._owner = owner
        self._memory = memory
        self._copies = copies
        self._writers = writers
        self._transfer_timeout_s = transfer_timeout_s
        self._room = Room(memory)
        self._leases: dict[TensorId, Lease] = {}
        self._by_request: dict[RequestId, set[TensorId]] = {}
        self._ending: dict[TensorId, Lease] = {}  # ended, still pinned
        self._writing: set[asyncio.Future[None]] = set()
        self._count = itertools.count(1)
        self._is_closed = False

    # --- the producer's side ---------------------------------------------------------------------------------------------

    async def put(self, tensor: torch.Tensor, request_id: RequestId, lease_s: float) -> TensorRef:
        """Copy a tensor in.

        Raises:
            Overloaded: no room within min(lease_s, PUT_WAIT_S), or too many leases.
        """
        shape = tuple(tensor.shape)
        lease = self._new_lease(shape, tensor.dtype, request_id)
        lease.offset = await self._room.take(lease.num_bytes, min(lease_s, PUT_WAIT_S))
        copies = None if lease.num_bytes <= INLINE_COPY_BYTES else self._copies
        await self._fill(lease, lambda destination: self._memory.copy(destination, tensor), copies)
        return self._add(lease, lease_s)

    async def put_lazy(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        request_id: RequestId,
        lease_s: float,
        materialize: Callable[[torch.Tensor], None],
        on_release: Callable[[], None],
    ) -> TensorRef:
        """Lease without room; see `Transport.put_lazy`."""
        lease = self._new_lease(shape, dtype, request_id)
        lease.materialize, lease.on_release = materialize, on_release
        return self._add(lease, lease_s)

    async def put_kept(
        self, tensor: torch.Tensor, request_id: RequestId, lease_s: float, on_release: Callable[[], None], at_once: bool = False
    ) -> TensorRef:
        """Lease a tensor that stays where it is; see `Transport.put_kept`. at_once: where there is room it is copied in now, so
        that a peer that can read the memory need not ask for it."""
        lease = self._new_lease(tuple(tensor.shape), tensor.dtype, request_id)
        lease.kept, lease.on_release = tensor, on_release
        lease.offset = self._room.take_now(lease.num_bytes) if at_once else None
        if lease.offset is None:
            lease.materialize = lambda destination: self._memory.copy(destination, tensor)
        else:
            await self._fill(lease, lambda destination: self._memory.copy(destination, tensor), None)
        return self._add(lease, lease_s)

    def get(self, tensor_id: TensorId) -> torch.Tensor:
        """A stored tensor itself, for use on this instance; see `Transport.get`."""
        lease = self._leases.get(tensor_id)
        if lease is not None and lease.kept is not None:
            return lease.kept
        if lease is None or lease.materialize is not None:
            raise tensor_gone()
        return self.tensor(lease)

    def release(self, tensor_id: TensorId) -> None:
        """End one lease. Idempotent."""
        lease = self._leases.get(tensor_id)
        if lease is not None:
            self._end(lease)

    def release_request(self, request_id: RequestId) -> None:
        """End all leases of a request. Idempotent."""
        for tensor_id in tuple(self._by_request.get(request_id, ())):
            self.release(tensor_id)

    def sweep(self, now_s: float) -> None:
        """End every lease whose time is over: all are looked at, because deadlines are not ordered."""
        for lease in [lease for lease in self._leases.values() if lease.deadline_s <= now_s]:
            self._end(lease)
        if not self._leases and not self._ending:
            self._memory.trim()

    # --- the consumer's side ---------------------------------------------------------------------------------------------

    async def begin_pull(self, message: PullRequest) -> Lease:
        """Pin a tensor for one transfer until `end_pull`; a lazy one is written into the memory first.

        Raises:
            InstanceLost: not held (code tensor_gone).
            InternalError: the puller expects something else than is stored.
            Overloaded: no room for a lazy tensor; DeadlineExceeded: it took too long.
        """
        lease = self._leases.get(message.tensor_id)
        if lease is None:
            raise tensor_gone()
        timeout_s = min(message.timeout_s, self._transfer_timeout_s)
        key = lease.pin(message, time.monotonic() + timeout_s)
        try:
            if lease.offset is None:
                await self._materialize(lease, timeout_s)
        except BaseException:
            self.end_pull(message.tensor_id, key)
            raise
        if key not in lease.pulls:
            raise tensor_gone()  # given up by its puller meanwhile
        return lease

    def end_pull(self, tensor_id: TensorId, key: PullKey) -> None:
        """A transfer is over. Idempotent."""
        lease = self._leases.get(tensor_id) or self._ending.get(tensor_id)
        if lease is not None and lease.pulls.pop(key, None) is not None:
            self._settle(lease)

    def is_pulled(self, tensor_id: TensorId, key: PullKey) -> bool:
        """That transfer is under way."""
        lease = self._leases.get(tensor_id) or self._ending.get(tensor_id)
        return lease is not None and key in lease.pulls

    def tensor(self, lease: Lease) -> torch.Tensor:
        """The tensor of a pinned lease, not to be written."""
        return self._memory.tensor(self.offset_of(lease), lease.shape, lease.dtype)

    def offset_of(self, lease: Lease) -> int:
        """Where a pinned lease lies in the memory."""
        if lease.offset is None:
            raise tensor_gone()
        return lease.offset

    def pulls(self, puller: InstanceId | None = None, due_s: float | None = None) -> list[tuple[TensorId, PullKey]]:
        """Transfers under way, of one puller, or those to be given up at due_s."""
        return [
            (lease.tensor_id, key)
            for lease in (*self._leases.values(), *self._ending.values())
            for key, until_s in lease.pulls.items()
            if (puller is None or key.puller == puller) and (due_s is None or until_s <= due_s)
        ]

    # --- the whole -------------------------------------------------------------------------------------------------------

    def usage(self) -> tuple[int, int, int]:
        """Bytes in use, capacity in bytes, leases held (ended ones that are still being pulled included)."""
        allocator = self._memory.allocator
        return allocator.used_bytes, allocator.capacity_bytes, len(self._leases) + len(self._ending)

    def check_integrity(self) -> None:
        """free + used == capacity without overlap, every range has an owner, both indexes agree.

        Raises:
            AssertionError: with what is wrong.
        """
        self._memory.allocator.check_integrity()
        offsets = [lease.offset for lease in (*self._leases.values(), *self._ending.values()) if lease.offset is not None]
        num_ranges = self._memory.allocator.num_ranges
        if len(set(offsets)) != len(offsets) or (not self._writing and len(offsets) != num_ranges):
            raise AssertionError(f"{len(offsets)} leases in {num_ranges} ranges")
        if {tensor_id for ids in self._by_request.values() for tensor_id in ids} != self._leases.keys():
            raise AssertionError("the index by request differs from the leases")

    async def close(self) -> None:
        """End everything and wait for writes under way, at most transfer_timeout_s. Every on_release has been called when
        this returns, except that of a tensor whose materialize still runs then."""
        self._is_closed = True
        self._room.close()
        for tensor_id, key in self.pulls():
            self.end_pull(tensor_id, key)
        for lease in tuple(self._leases.values()):
            self._end(lease)
        deadline_s = time.monotonic() + self._transfer_timeout_s
        while self._writing and time.monotonic() < deadline_s:
            await asyncio.wait(self._writing, timeout=deadline_s - time.monotonic())
        self._memory.close()

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _new_lease(self, shape: tuple[int, ...], dtype: torch.dtype, request_id: RequestId) -> Lease:
        if self._is_closed or len(self._leases) >= MAX_LEASES:
            raise Overloaded("the tensor store takes no more tensors", code="tensor_store_full")
        dtype_name(dtype)  # refuses what cannot travel
        tensor_id = TensorId(f"{next(self._count):x}-{secrets.token_hex(8)}")
        return Lease(tensor_id, request_id, shape, dtype, num_bytes_of(shape, dtype))

    def _add(self, lease: Lease, lease_s: float) -> TensorRef:
        if self._is_closed:
            self._free_room(lease)
            raise Overloaded("the tensor store is closed", code="tensor_store_full")
        lease.deadline_s = time.monotonic() + lease_s
        self._leases[lease.tensor_id] = lease
        self._by_request.setdefault(lease.request_id, set()).add(lease.tensor_id)
        what = lease.shape, dtype_name(lease.dtype), lease.num_bytes
        return TensorRef(lease.tensor_id, self._owner, *what, lease_s, lease.offset)

    async def _fill(self, lease: Lease, write: Callable[[torch.Tensor], None], threads: Executor | None) -> None:
        """Write a lease's range, here when threads is None. The range is given back when that fails, and when the caller
        is cancelled, after the thread is done with it."""
        destination = self.tensor(lease)
        try:
            if threads is None:
                write(destination)
            else:
                await self._in_thread(threads, lambda: write(destination))
            self._memory.stamp(self.offset_of(lease), lease.tensor_id, lease.shape, lease.dtype)
        except BaseException:
            self._free_room(lease)
            raise

    async def _in_thread(self, threads: Executor, call: Callable[[], None]) -> None:
        """Run call in a thread; when cancelled, still wait for it: it writes into memory that is freed after."""
        future = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(threads, call))
        self._writing.add(future)
        future.add_done_callback(self._writing.discard)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):  # the first one is raised again below
                    await asyncio.wait([future])
            raise

    async def _materialize(self, lease: Lease, timeout_s: float) -> None:
        """Write a lazy tensor, once for all who wait for it."""
        if lease.filling is None:
            lease.filling = asyncio.create_task(self._fill_lazy(lease, timeout_s))
            self._writing.add(lease.filling)
            lease.filling.add_done_callback(lambda task: self._filled(lease, task))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(lease.filling)
        except TimeoutError:
            raise DeadlineExceeded("a tensor was not written in time") from None

    async def _fill_lazy(self, lease: Lease, timeout_s: float) -> None:
        assert lease.materialize is not None
        lease.offset = await self._room.take(lease.num_bytes, timeout_s)
        try:
            await self._fill(lease, lease.materialize, self._writers)
        except TriptychError:
            raise
        except Exception as error:
            log.exception("writing a leased tensor failed")
            raise InternalError("writing a leased tensor failed") from error

    def _filled(self, lease: Lease, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        lease.filling = None
        if not task.cancelled():
            task.exception()  # seen: whoever waits raises it, and there may be nobody left
        self._settle(lease)

    def _end(self, lease: Lease) -> None:
        if lease.ended:
            return
        lease.ended = True
        del self._leases[lease.tensor_id]
        ids = self._by_request[lease.request_id]
        ids.discard(lease.tensor_id)
        if not ids:
            del self._by_request[lease.request_id]
        self._ending[lease.tensor_id] = lease
        self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        """Free what nobody uses any more."""
        if lease.pulls or lease.filling is not None:
            return
        if lease.ended or lease.materialize is not None:
            self._free_room(lease)
        if lease.ended and self._ending.pop(lease.tensor_id, None) is not None and lease.on_release is not None:
            try:
                lease.on_release()
            except Exception:
                log.exception("on_release of a tensor failed")

    def _free_room(self, lease: Lease) -> None:
        if lease.offset is not None:
            offset, lease.offset = lease.offset, None
            self._room.give_back(offset)
