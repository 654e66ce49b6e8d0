"""`InstanceTransport`: one instance's store, its pulls from others, and what it owes to those who pull from it.

The host of the instance hands PullRequest, PullDone and PairRequest from the bus to on_pull, on_pull_done and on_pair, and
calls forget_peer when the registry loses an instance.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, Overloaded
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import (
    Accepted,
    InstanceId,
    PairRequest,
    PullDone,
    PullReply,
    PullRequest,
    RequestId,
    TensorId,
    TensorRef,
)
from triptych.shared.transport.api import Buffer, ControlPlane
from triptych.shared.transport.arena import Arena
from triptych.shared.transport.layout import checked_dtype
from triptych.shared.transport.lease import PullKey
from triptych.shared.transport.local import pull_local
from triptych.shared.transport.memory import INLINE_COPY_BYTES
from triptych.shared.transport.own_tensors import MAX_PULLS_UNDER_WAY, OwnTensors
from triptych.shared.transport.pulling import Mode, Pull, Puller
from triptych.shared.transport.rendezvous import Rendezvous, address_of
from triptych.shared.transport.shared_memory import SharedMemory
from triptych.shared.transport.store import TensorStore
from triptych.shared.transport.torch_distributed import Owners, Pullers

_NUM_COPY_THREADS = 2  # chosen: one memcpy nearly fills the memory bus; the second keeps small copies from waiting
_NUM_WRITE_THREADS = 2  # chosen: they may wait for an engine's step, which copies must not

T = TypeVar("T")


class InstanceTransport(OwnTensors):
    """Implements `Transport`. Call `start` first; `address` is known after it."""

    address: TransportAddress

    def __init__(
        self,
        instance_id: InstanceId,
        control: ControlPlane,
        bind_host: str,
        capacity_bytes: int,
        mode: Mode = "auto",
        transfer_timeout_s: float = 15.0,
    ) -> None:
        copies = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="transport-copy")
        arena = Arena(capacity_bytes)
        writers = ThreadPoolExecutor(_NUM_WRITE_THREADS, thread_name_prefix="transport-write")
        super().__init__(TensorStore(instance_id, arena, copies, writers, transfer_timeout_s))
        self._instance_id = instance_id
        self._control = control
        self._bind_host = bind_host
        self._mode: Mode = mode
        self._transfer_timeout_s = transfer_timeout_s
        self._copies, self._arena, self._writers = copies, arena, writers
        self._shared_memory = SharedMemory(self._copies)
        self._rendezvous: Rendezvous | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._num_pulls = 0
        self._lost: dict[InstanceId, asyncio.Future[None]] = {}  # set when the peer that we pull from is forgotten

    async def start(self) -> None:
        """Bind to bind_host, begin to sweep."""
        rendezvous = self._rendezvous = await asyncio.to_thread(Rendezvous, self._bind_host)  # it may ask a name server
        self.address = address_of(rendezvous, self._arena.path, self._arena.token)
        self._pullers = Pullers(self._instance_id, rendezvous, self._copies)
        self._owners = Owners(self._instance_id, rendezvous, self._control)
        self._puller = Puller(self._instance_id, self._control, self._mode, self._shared_memory, self._owners)
        self._spawn(self._sweep_forever())

    # --- our own tensors -------------------------------------------------------------------------------------------------

    async def put_bytes(self, data: Buffer, shape: tuple[int, ...], request_id: RequestId, lease_s: float) -> TensorRef:
        return await self.put(torch.frombuffer(data, dtype=torch.uint8).view(shape), request_id, lease_s)

    async def put_kept(
        self, tensor: torch.Tensor, request_id: RequestId, lease_s: float, on_release: Callable[[], None]
    ) -> TensorRef:
        is_small = tensor.device.type == "cpu" and tensor.nbytes <= INLINE_COPY_BYTES
        return await self._store.put_kept(tensor, request_id, lease_s, on_release, at_once=is_small)

    # --- tensors of others -----------------------------------------------------------------------------------------------

    async def pull(
        self,
        ref: TensorRef,
        peer: TransportAddress,
        timeout_s: float,
        release: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pull = self._new_pull(ref, peer, timeout_s, release, out)
        if ref.owner != self._instance_id and (copied := self._puller.copied(pull)) is not None:
            if release:
                self._spawn(self._puller.release_later(pull))
            return copied
        if self._num_pulls >= MAX_PULLS_UNDER_WAY:
            raise Overloaded("too many transfers at once", code="too_many_pulls")
        # a task of its own: a transfer under way cannot be stopped, only outlived, so a cancelled caller leaves it behind
        self._num_pulls += 1
        task = self._spawn(self._pull(pull))
        task.add_done_callback(self._pulled)
        lost = self._lost.setdefault(ref.owner, asyncio.get_running_loop().create_future())
        ends: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(ends, timeout=pull.remaining_s(), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if lost.done():
            raise InstanceLost("the owner of a tensor is gone", instance_id=ref.owner)
        raise DeadlineExceeded("a tensor transfer ran out of time")

    def _new_pull(
        self, ref: TensorRef, peer: TransportAddress, timeout_s: float, release: bool, out: torch.Tensor | None
    ) -> Pull:
        dtype = checked_dtype(ref)
        if out is not None and (out.shape != ref.shape or out.dtype != dtype or not out.is_contiguous()):
            raise InternalError("the given tensor doesn't fit the reference", code="tensor_mismatch")
        deadline_s = time.monotonic() + min(timeout_s, self._transfer_timeout_s)
        device = out.device if out is not None else torch.device("cpu")

        def allocate() -> torch.Tensor:
            return torch.empty(ref.shape, dtype=dtype) if out is None else out

        return Pull(ref, peer, self._puller.next_transfer_id(), deadline_s, release, device, allocate)

    async def _pull(self, pull: Pull) -> torch.Tensor:
        if pull.ref.owner == self._instance_id:
            request = pull.request(self._instance_id, "local")
            return await pull_local(self._store, request, pull.allocate(), self._copies, pull.release)
        return await self._puller.pull(pull)

    def _pulled(self, task: asyncio.Task[torch.Tensor]) -> None:
        self._num_pulls -= 1
        if not task.cancelled():
            task.exception()  # seen: the caller may have left

    # --- what we owe to those who pull from us ---------------------------------------------------------------------------

    async def on_pull(self, message: PullRequest) -> PullReply:
        """Pin the tensor for the puller, and start to send it when the channel is a pair."""
        if message.channel not in ("shared_memory", "gloo", "nccl"):
            raise InternalError("a puller asks for an unknown channel", code="bad_channel")
        lease = await self._store.begin_pull(message)
        if message.channel == "shared_memory":
            return PullReply(self._store.offset_of(lease))
        key = PullKey(message.puller, message.transfer_id)
        try:
            if lease.num_bytes:
                timeout_s = min(message.timeout_s, self._transfer_timeout_s)
                await self._pullers.send(
                    message, lambda: self._arena.view(self._store.offset_of(lease), lease.num_bytes), timeout_s
                )
        except BaseException:
            self._spawn(self._finish(message.tensor_id, key))
            raise
        return PullReply()

    def on_pull_done(self, message: PullDone) -> None:
        key = PullKey(message.puller, message.transfer_id)
        if message.release:
            self._store.release(message.tensor_id)  # nobody finds it from now on; its room follows its last pull
        if not self._pullers.has(message.puller):
            self._store.end_pull(message.tensor_id, key)
        elif self._store.is_pulled(message.tensor_id, key):
            self._spawn(self._finish(message.tensor_id, key))

    async def on_pair(self, message: PairRequest) -> Accepted:
        self._pullers.accept(message, min(message.timeout_s, self._transfer_timeout_s))
        return Accepted()

    def forget_peer(self, instance_id: InstanceId) -> None:
        self._shared_memory.forget(instance_id)
        self._owners.forget(instance_id)
        lost = self._lost.pop(instance_id, None)
        if lost is not None and not lost.done():
            lost.set_result(None)
        if self._pullers.has(instance_id):
            self._spawn(self._give_up(instance_id, self._store.pulls(instance_id)))
        else:
            for tensor_id, key in self._store.pulls(instance_id):
                self._store.end_pull(tensor_id, key)

    async def _finish(self, tensor_id: TensorId, key: PullKey) -> None:
        """Over torch.distributed the memory is free only after the send is."""
        await self._pullers.finish(key.puller, key.transfer_id)
        self._store.end_pull(tensor_id, key)

    async def _give_up(self, puller: InstanceId, pulls: list[tuple[TensorId, PullKey]]) -> None:
        await self._pullers.drop(puller)
        for tensor_id, key in pulls:
            self._store.end_pull(tensor_id, key)

    async def _sweep(self, now_s: float) -> None:
        overdue = self._store.pulls(due_s=now_s)
        for puller in {key.puller for _, key in overdue}:
            await self._give_up(puller, [pull for pull in overdue if pull[1].puller == puller])
        self._store.sweep(now_s)

    # --- the end ---------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends all transfers and leases; see `TensorStore.close`. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._transfer_timeout_s)
        if self._rendezvous is not None:
            await self._owners.close()
            await self._pullers.close()
            self._rendezvous.close()
        await self._store.close()
        self._copies.shutdown(wait=False)  # idle by now, or stuck beyond the timeout
        self._writers.shutdown(wait=False)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
