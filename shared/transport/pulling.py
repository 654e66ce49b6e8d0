"""One pull, from choosing the channel to PullDone: the puller's half of the protocol.

puller                                   owner
  | -- PairRequest (gloo, first time) --> |  both join the group
  | -- PullRequest ---------------------> |  pins the tensor; gloo: posts the send
  | <-- PullReply or a typed refusal ---- |
  |    memcpy, or receive                 |
  | -- PullDone ------------------------> |  unpins, maybe drops

What lies in an arena that we can read is copied without asking; its stamp tells afterwards whether it was still there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from triptych.shared.errors import UNREACHABLE, DeadlineExceeded, InstanceLost, InternalError, TriptychError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import InstanceId, PullDone, PullReply, PullRequest, TensorRef
from triptych.shared.transport.api import ControlPlane
from triptych.shared.transport.memory import INLINE_COPY_BYTES
from triptych.shared.transport.pair import MAX_PIECES, Pair, pair_lost
from triptych.shared.transport.shared_memory import PeerArena, SharedMemory
from triptych.shared.transport.torch_distributed import Owners, backend_of

Mode = Literal["auto", "gloo", "shared_memory"]

RELEASE_DELAY_S = 0.005  # chosen: a step of the engine is begun by then
_TAGS = 1 << 31
# The owner's answers that it gives before it sends anything, and NATS's that nobody is there. After any other failure, such as
# a lost reply, a send may be under way.
_REFUSALS = frozenset(
    ("tensor_gone", "tensor_mismatch", "too_many_pulls", "tensor_store_full", "tensor_too_large", UNREACHABLE)
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pull:
    """What one pull is to do. `allocate` makes the destination, once the owner has agreed."""

    ref: TensorRef
    address: TransportAddress
    transfer_id: int
    deadline_s: float
    release: bool
    device: torch.device
    allocate: Callable[[], torch.Tensor]

    def remaining_s(self) -> float:
        """Raises DeadlineExceeded when there is nothing left."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("a tensor transfer ran out of time")
        return left_s

    def request(self, puller: InstanceId, channel: str, epoch: int = 0) -> PullRequest:
        ref, timeout_s = self.ref, self.remaining_s()
        return PullRequest(
            ref.tensor_id, puller, channel, self.transfer_id, ref.shape, ref.dtype, ref.num_bytes, timeout_s, epoch
        )


class Puller:
    """Pulls from other instances, over shared memory where that works, else over torch.distributed."""

    def __init__(
        self, instance_id: InstanceId, control: ControlPlane, mode: Mode, shared_memory: SharedMemory, owners: Owners
    ) -> None:
        self._instance_id = instance_id
        self._control = control
        self._mode = mode
        self._shared_memory = shared_memory
        self._owners = owners
        self._transfer_ids = itertools.count(MAX_PIECES, MAX_PIECES)

    def next_transfer_id(self) -> int:
        """Unique among this puller's last half a million transfers: Gloo's tags are 31 bits, a transfer takes MAX_PIECES."""
        return next(self._transfer_ids) % _TAGS

    def copied(self, pull: Pull) -> torch.Tensor | None:
        """A small tensor that lies in memory we can read, to be released by `release_later`. None: it takes a `pull`. Raises
        what that raises."""
        if pull.ref.offset is None or pull.ref.num_bytes > INLINE_COPY_BYTES or (arena := self._arena_of(pull)) is None:
            return None
        destination = pull.allocate()
        self._shared_memory.copy_now(arena, pull.ref.offset, pull.ref.tensor_id, destination)
        return destination

    async def release_later(self, pull: Pull) -> None:
        """When whoever waited for the tensor has gone on: its room can wait."""
        await asyncio.sleep(RELEASE_DELAY_S)
        await self.publish_done(pull, release=True)

    def _arena_of(self, pull: Pull) -> PeerArena | None:
        return self._shared_memory.arena_of(pull.ref.owner, pull.address) if self._mode != "gloo" else None

    async def pull(self, pull: Pull) -> torch.Tensor:
        """Raises what `Transport.pull` raises."""
        arena = self._arena_of(pull)
        if arena is not None:
            async with _Done(self, pull) as done:
                offset = pull.ref.offset
                if offset is None:
                    offset = (await self._ask(pull, pull.request(self._instance_id, "shared_memory"))).offset
                destination = pull.allocate()
                await self._shared_memory.copy(arena, offset, pull.ref.tensor_id, destination)
                done.is_copied = True
            return destination
        if self._mode == "shared_memory":
            async with _Done(self, pull):
                await self._ask(pull, pull.request(self._instance_id, "shared_memory"))  # a dead owner is InstanceLost
            raise InternalError("the owner's shared memory cannot be reached from here", code="transport_unusable")
        try:
            return await self._pull_over_pair(pull)
        except InstanceLost as error:
            if error.code != "pair_lost":
                raise
        pull = replace(pull, transfer_id=self.next_transfer_id())
        return await self._pull_over_pair(pull)  # the tensor may well be there still; a dead owner fails at once

    async def _pull_over_pair(self, pull: Pull) -> torch.Tensor:
        backend = backend_of(pull.device)
        pull.remaining_s()
        pair = await self._owners.pair_with(pull.ref.owner, pull.address, backend, pull.deadline_s)
        try:
            async with asyncio.timeout(pull.remaining_s()):
                await pair.slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded("a tensor waited too long behind other transfers") from None
        try:
            if pair.is_closed:
                raise pair_lost()  # a transfer before ours has broken it
            request = pull.request(self._instance_id, backend, pair.epoch)
            return await self._receive(pull, pair, request)
        finally:
            pair.slots.release()

    async def _receive(self, pull: Pull, pair: Pair, request: PullRequest) -> torch.Tensor:
        """From here on a send may be under way: whatever fails, but for a refusal, breaks the pair."""
        is_refused = False
        try:
            async with _Done(self, pull) as done:
                try:
                    await self._ask(pull, request)
                except TriptychError as error:
                    is_refused = error.code in _REFUSALS
                    raise
                destination = pull.allocate()
                if pull.ref.num_bytes:
                    await self._receive_bytes(pull, pair, destination)
                done.is_copied = True
            return destination
        except BaseException:
            if not is_refused:
                self._owners.discard(pull.ref.owner, pair)
            raise

    async def _receive_bytes(self, pull: Pull, pair: Pair, destination: torch.Tensor) -> None:
        try:
            await pair.receive(pull.transfer_id, destination, pull.remaining_s())
        except InstanceLost:
            pull.remaining_s()  # when the time is over, that was the reason
            raise

    async def _ask(self, pull: Pull, request: PullRequest) -> PullReply:
        reply = await self._control.request(pull.ref.owner, request, request.timeout_s)
        if not isinstance(reply, PullReply):
            raise InternalError("the owner of a tensor answered with something else", code="bad_reply")
        return reply

    async def publish_done(self, pull: Pull, release: bool) -> None:
        """Best effort: without it the owner's own timeout ends the transfer."""
        message = PullDone(pull.ref.tensor_id, self._instance_id, pull.transfer_id, release)
        try:
            await self._control.publish(pull.ref.owner, message)
        except Exception:
            log.warning("could not tell the owner of a tensor that a pull is over", exc_info=True)


class _Done:
    """Publishes PullDone at the end of a transfer, whatever the end."""

    def __init__(self, puller: Puller, pull: Pull) -> None:
        self._puller = puller
        self._pull = pull
        self.is_copied = False

    async def __aenter__(self) -> _Done:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._puller.publish_done(self._pull, self._pull.release and self.is_copied)
