"""What the instance host and its roles agree on: a role owns its queues, the host owns weights, KV pool and transport.

services/instance.py makes one HostContext and gives it to each role; roles know neither the host nor each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from triptych.shared.engine.api import Engine
from triptych.shared.engine.health import EngineHealth
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.engine.thread import EngineCalls
from triptych.shared.errors import DeadlineExceeded, InstanceLost, Overloaded
from triptych.shared.instance_info import StageLoad, TransportAddress
from triptych.shared.messages import Event, InstanceId, InstanceRequest, Message, TensorRef
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.settings import Settings
from triptych.shared.transport.api import Transport

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch

B = TypeVar("B")
T = TypeVar("T")

MAX_PULLS = 8  # chosen: pulls of one role at once; one saturates the loopback, more hide the control messages' round trips
LEASE_GRACE_S = 5.0  # chosen: a lease outlives its request's deadline by this, for messages under way


@dataclass(frozen=True, slots=True)
class HostContext:
    """What a role works with. max_model_len: longest prompt + output in tokens that model, KV pool and store allow.
    peer_address: how to reach an instance's tensors, None when it is not known (any more); may wait for its first heartbeat.
    host_memory: a new tensor outside of the accelerator, not initialised."""

    settings: Settings
    instance_id: InstanceId
    engine: Engine
    thread: EngineCalls
    health: EngineHealth
    kv: KvBlocks
    transport: Transport
    tasks: RequestTasks
    max_model_len: int
    peer_address: Callable[[InstanceId], Awaitable[TransportAddress | None]]
    publish_event: Callable[[str, Event], Awaitable[None]]
    host_memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

    async def compute(self, call: Callable[[B], list[T]], batch: B) -> list[T]:
        """call(batch) as an engine call; what came of each item, results and exceptions."""
        outcomes = await self.thread.run(call, batch)
        self.health.note(outcomes)
        return outcomes

    async def pull(self, ref: TensorRef) -> torch.Tensor:
        """A peer's tensor, which the peer drops; one of our own without copying, to be released after use.

        Raises:
            InstanceLost: the owner is gone, silent for transfer_timeout_s, or no longer holds it.
        """
        if ref.owner == self.instance_id:
            return self.transport.get(ref)
        peer = await self.peer_address(ref.owner)
        if peer is None:
            raise InstanceLost("an instance that holds a part of the request is gone", instance_id=ref.owner)
        try:
            return await self.transport.pull(ref, peer, self.settings.transfer_timeout_s)
        except DeadlineExceeded:
            raise InstanceLost("a tensor transfer took too long", instance_id=ref.owner, code="transfer_timeout") from None

    def drop(self, ref: TensorRef) -> None:
        """After `pull`: release the tensor when it is our own."""
        if ref.owner == self.instance_id:
            self.transport.release(ref.tensor_id)


class StageRole(Protocol):
    """One role of an instance. Requests are cancelled by cancelling the task that `handle` runs in, or, for work that goes
    on after `handle` returned, through HostContext.tasks."""

    async def start(self) -> None:
        """Take work from now on."""
        ...

    def stop_intake(self) -> None:
        """Refuse new requests; those at hand go on."""
        ...

    def is_idle(self) -> bool:
        """No request is at hand."""
        ...

    async def handle(self, request: InstanceRequest) -> Message:
        """Answer a request of this role. Raises TriptychError."""
        ...

    def load(self) -> StageLoad: ...

    async def stop(self) -> None:
        """End the role's own tasks."""
        ...


class Intake:
    """Whether a role takes one more request: it is open and under its bound."""

    def __init__(self, stage: str, max_waiting: int) -> None:
        self._stage = stage
        self._max_waiting = max_waiting
        self.is_open = False

    def check(self, num_waiting: int) -> None:
        """Raises Overloaded when it does not."""
        if not self.is_open:
            raise Overloaded(f"this {self._stage} instance takes no new requests", code="stage_unavailable")
        if num_waiting >= self._max_waiting:
            raise Overloaded(f"{num_waiting} requests wait at this {self._stage} instance already")


def settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Give `future` its result or exception, unless its waiter was cancelled. An exception that then nobody looks at is
    not reported as forgotten."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()
    else:
        future.set_result(outcome)


@asynccontextmanager
async def deadline(timeout_s: float) -> AsyncIterator[None]:
    """Bounds the block.

    Raises:
        DeadlineExceeded: the block took longer than timeout_s and was cancelled.
    """
    try:
        async with asyncio.timeout(max(timeout_s, 0.0)) as scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise DeadlineExceeded() from None
        raise
