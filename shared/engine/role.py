"""What the roles of an instance have in common: what the host asks of each, and the bounds and waits that all need.

A role owns its queues; the host owns weights, KV pool, caches and transport, and gives them to each role as a HostContext
(services/host_context.py). Roles know neither the host nor each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from triptych.shared.errors import GIVEN_UP, DeadlineExceeded, InstanceLost, Overloaded
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import InstanceRequest, Message

T = TypeVar("T")

MAX_PULLS = 8  # chosen: pulls of one role at once; one saturates the loopback, more hide the control messages' round trips
LEASE_GRACE_S = 5.0  # chosen: a lease outlives its request's deadline by this, for messages under way


class StageRole(Protocol):
    """One role of an instance. Requests are cancelled by cancelling the task that `handle` runs in, or, for work that goes
    on after `handle` returned, through RequestTasks."""

    async def start(self) -> None:
        """Take work from now on."""
        ...

    def open_intake(self) -> None:
        """Take new requests, again."""
        ...

    def close_intake(self) -> None:
        """Refuse new requests; those at hand go on, elsewhere where that is possible."""
        ...

    def is_idle(self) -> bool:
        """No request is at hand."""
        ...

    async def handle(self, request: InstanceRequest) -> Message:
        """Answer a request of this role. Raises TriptychError."""
        ...

    def load(self) -> StageLoad: ...

    async def stop(self) -> None:
        """End the role's own tasks; requests at hand end in InstanceLost, so that they are tried elsewhere."""
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


def given_up() -> InstanceLost:
    """What a request ends in whose role ends."""
    return InstanceLost("an instance gave a request up", code=GIVEN_UP)


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
