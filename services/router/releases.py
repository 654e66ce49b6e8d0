"""Tells instances that a request has ended, so that they free what they hold for it. Used by the router's app.

A release that gets lost costs memory until its lease ends, and a NATS restart loses what was on its way, or what came
before the instance had subscribed again. So after a reconnect the releases of late are said once more; they are idempotent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from typing import Protocol

from triptych.shared.messages import InstanceId, Message, ReleaseRequest, RequestId

REMEMBERED_S = 30.0  # chosen: NATS is back within seconds when it restarts; later ones are left to their leases
MAX_REMEMBERED = 8192  # chosen: about 1 MB, and as many messages in one go
REPEAT_AFTER_S = 2.0  # chosen: peers reconnect and subscribe again within their own wait, as the bus's grace time has it
STOP_TIMEOUT_S = 5.0  # chosen: releases on their way when the process ends


class ReleaseBus(Protocol):
    """What of the bus is needed here."""

    async def publish(self, instance_id: InstanceId, message: Message) -> None: ...


class Releases:
    """One per router. Event loop only."""

    def __init__(self, bus: ReleaseBus) -> None:
        self._bus = bus
        self._recent: deque[tuple[float, InstanceId, RequestId]] = deque(maxlen=MAX_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeating: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """No release waits to be sent."""
        return not self._tasks

    def release(self, request_id: RequestId, instances: Collection[InstanceId]) -> None:
        """Not awaited: must not be cut off when the request is cancelled."""
        if not instances:
            return
        now_s = time.monotonic()
        while self._recent and self._recent[0][0] < now_s - REMEMBERED_S:
            self._recent.popleft()
        entries = [(now_s, instance_id, request_id) for instance_id in sorted(instances)]
        self._recent.extend(entries)
        task = asyncio.create_task(self._publish(entries), name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def on_reconnected(self) -> None:
        """The bus was away: say again, a little later, what may not have been heard."""
        if self._repeating is not None:
            self._repeating.cancel()
        self._repeating = asyncio.create_task(self._repeat(), name="repeat releases")

    async def stop(self) -> None:
        """What is on its way goes out first."""
        if self._repeating is not None:
            self._repeating.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)

    async def _repeat(self) -> None:
        await asyncio.sleep(REPEAT_AFTER_S)
        earliest_s = time.monotonic() - REMEMBERED_S
        await self._publish([entry for entry in self._recent if entry[0] >= earliest_s])

    async def _publish(self, entries: list[tuple[float, InstanceId, RequestId]]) -> None:
        for _, instance_id, request_id in entries:
            await self._bus.publish(instance_id, ReleaseRequest(request_id))
