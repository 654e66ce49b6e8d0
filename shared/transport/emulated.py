"""The transport of emulated instances: the same store, leases and control messages, stand-ins for tensors, and a modelled
network link in place of copies. No torch.

A pull takes as long as its bytes need at the owner's end of the network or at the puller's, whichever is later: transfers of
one direction of one link take turns, so that several at once slow each other down.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import TYPE_CHECKING

from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.errors import DeadlineExceeded, InternalError, Overloaded
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import (
    Accepted,
    InstanceId,
    PairRequest,
    PullDone,
    PullReply,
    PullRequest,
    RequestId,
    TensorRef,
)
from triptych.shared.transport.api import Buffer, ControlPlane
from triptych.shared.transport.lease import PullKey
from triptych.shared.transport.own_tensors import MAX_PULLS_UNDER_WAY, OwnTensors
from triptych.shared.transport.stand_in import AtOnce, StandInMemory, stand_in
from triptych.shared.transport.store import TensorStore

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

CHANNEL = "emulated"
ADDRESS = TransportAddress("", "", "", 0)  # peers are reached by control messages alone


class Lane:
    """One direction of one instance's link. Real seconds of time.monotonic(), modelled bytes."""

    def __init__(self, link: LinkCosts, time_scale: float) -> None:
        self._latency_s = link.latency_s / time_scale
        self._byte_s = 1.0 / (link.bytes_per_s * time_scale)
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, now_s: float) -> float:
        """When the last of num_bytes has passed, behind all that was reserved before."""
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes * self._byte_s
        return self._free_at_s + self._latency_s


class EmulatedTransport(OwnTensors):
    """Implements `Transport`. Call `start` first."""

    def __init__(
        self,
        instance_id: InstanceId,
        control: ControlPlane,
        capacity_bytes: int,
        link: LinkCosts,
        time_scale: float,
        transfer_timeout_s: float,
    ) -> None:
        store = TensorStore(instance_id, StandInMemory(capacity_bytes), AtOnce(), AtOnce(), transfer_timeout_s)
        super().__init__(store)
        self.address = ADDRESS
        self._instance_id = instance_id
        self._control = control
        self._transfer_timeout_s = transfer_timeout_s
        self._outward, self._inward = Lane(link, time_scale), Lane(link, time_scale)
        self._transfer_ids = itertools.count(1)
        self._num_pulls = 0
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to sweep."""
        self._sweeping = asyncio.create_task(self._sweep_forever(), name="transport sweep")

    # --- our own tensors -------------------------------------------------------------------------------------------------

    async def put_bytes(self, data: Buffer, shape: tuple[int, ...], request_id: RequestId, lease_s: float) -> TensorRef:
        """Only the shape counts."""
        return await self.put(stand_in(shape), request_id, lease_s)

    # --- tensors of others -----------------------------------------------------------------------------------------------

    async def pull(
        self,
        ref: TensorRef,
        peer: TransportAddress,
        timeout_s: float,
        release: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._num_pulls >= MAX_PULLS_UNDER_WAY:
            raise Overloaded("too many transfers at once", code="too_many_pulls")
        if ref.dtype != "uint8" or math.prod(ref.shape) != ref.num_bytes:
            raise InternalError("a tensor reference contradicts itself", code="tensor_mismatch")
        if out is not None and out.shape != ref.shape:
            raise InternalError("the given tensor doesn't fit the reference", code="tensor_mismatch")
        self._num_pulls += 1
        is_done, transfer_id = False, next(self._transfer_ids)
        try:
            async with asyncio.timeout(min(timeout_s, self._transfer_timeout_s)):
                await self._transfer(ref, transfer_id, timeout_s)
            is_done = True
        except TimeoutError:
            raise DeadlineExceeded("a tensor transfer ran out of time") from None
        finally:
            self._num_pulls -= 1
            await self._control.publish(ref.owner, PullDone(ref.tensor_id, self._instance_id, transfer_id, release and is_done))
        return stand_in(ref.shape) if out is None else out

    async def _transfer(self, ref: TensorRef, transfer_id: int, timeout_s: float) -> None:
        arrived_at_s = self._inward.reserve(ref.num_bytes, time.monotonic())
        what = (ref.shape, ref.dtype, ref.num_bytes)
        request = PullRequest(ref.tensor_id, self._instance_id, CHANNEL, transfer_id, *what, timeout_s)
        reply = await self._control.request(ref.owner, request, timeout_s)  # comes when the owner has sent the last byte
        if not isinstance(reply, PullReply):
            raise InternalError("the owner of a tensor answered with something else", code="bad_reply")
        await asyncio.sleep(arrived_at_s - time.monotonic())

    # --- what we owe to those who pull from us ---------------------------------------------------------------------------

    async def on_pull(self, message: PullRequest) -> PullReply:
        """Pin the tensor for the puller until PullDone; answers when it has been sent."""
        if message.channel != CHANNEL:
            raise InternalError("a puller asks for an unknown channel", code="bad_channel")
        lease = await self._store.begin_pull(message)
        sent_at_s = self._outward.reserve(lease.num_bytes, time.monotonic())
        await asyncio.sleep(sent_at_s - time.monotonic())
        return PullReply()

    def on_pull_done(self, message: PullDone) -> None:
        if message.release:
            self._store.release(message.tensor_id)
        self._store.end_pull(message.tensor_id, PullKey(message.puller, message.transfer_id))

    async def on_pair(self, message: PairRequest) -> Accepted:
        raise InternalError("emulated instances form no pairs", code="bad_channel")

    def forget_peer(self, instance_id: InstanceId) -> None:
        for tensor_id, key in self._store.pulls(instance_id):
            self._store.end_pull(tensor_id, key)

    async def _sweep(self, now_s: float) -> None:
        for tensor_id, key in self._store.pulls(due_s=now_s):
            self._store.end_pull(tensor_id, key)
        self._store.sweep(now_s)

    async def close(self) -> None:
        """Ends all leases. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._store.close()
