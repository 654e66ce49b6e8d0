"""Who is there: the recent heartbeats of all processes (soft state, nothing is stored anywhere)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from triptych.shared.messages import Event, Heartbeat, InstanceId, Lost, Role, Service

NUM_REMEMBERED_LOST = 1024  # chosen: a late heartbeat of a dead instance comes within a second


class Registry:
    """Fed by on_event with Heartbeat and Lost; sweep() drops the silent. Not thread-safe: event loop only.

    Args:
        heartbeat_timeout_s: silence after which an instance is lost.
        own_id: our own heartbeats, which come back to us, have this id: while they don't, the bus is stuck.

    num_changes: grows whenever what is known of anybody changes, so that what was made of it can be kept until then.
    """

    def __init__(self, heartbeat_timeout_s: float, own_id: InstanceId | None = None) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._own_id = own_id
        self._beats: dict[InstanceId, Heartbeat] = {}
        self._seen_s: dict[InstanceId, float] = {}
        self._ended: deque[InstanceId] = deque(maxlen=NUM_REMEMBERED_LOST)
        self._no_sweep_until_s = 0.0
        self._lost_callbacks: list[Callable[[InstanceId], None]] = []
        self._changed = asyncio.Event()
        self.num_changes = 0

    def on_event(self, event: Event, now_s: float) -> None:
        """now_s: time.monotonic() of the caller. A heartbeat of an instance that has ended (Lost) is ignored; one that was
        only silent is welcome again."""
        if isinstance(event, Lost):
            if event.instance_id not in self._ended:
                self._ended.append(event.instance_id)
                self._forget(event.instance_id)
                self._changed.set()
        elif isinstance(event, Heartbeat) and event.instance_id not in self._ended:
            self._beats[event.instance_id] = event
            self.num_changes += 1
            self._seen_s[event.instance_id] = now_s
            self._changed.set()

    def sweep(self, now_s: float) -> None:
        """Forget instances silent for longer than heartbeat_timeout_s (their lost callbacks run). Skipped for one timeout
        after the bus was disconnected (note_reconnected) or stuck: our own silence is not theirs."""
        if self.is_stuck(now_s):
            self.note_reconnected(now_s)
        if now_s < self._no_sweep_until_s:
            return
        silent = [key for key, seen_s in self._seen_s.items() if now_s - seen_s > self._heartbeat_timeout_s]
        for instance_id in silent:
            self._forget(instance_id)

    def is_stuck(self, now_s: float) -> bool:
        """Whether nobody is heard, not even ourselves. A server that hangs, or a network that swallows everything, keeps the
        connection and silences all alike."""
        own = self._beats.get(self._own_id) if self._own_id is not None else None
        if own is None:
            return False
        return now_s - self._seen_s[own.instance_id] > max(self._heartbeat_timeout_s / 2, 2 * own.interval_s)

    def _forget(self, instance_id: InstanceId) -> None:
        for callback in self._lost_callbacks:
            callback(instance_id)
        self._beats.pop(instance_id, None)
        self._seen_s.pop(instance_id, None)
        self.num_changes += 1

    def note_stall(self, lag_s: float, now_s: float) -> None:
        """We stood still for lag_s: others' heartbeats of that time are still unread. Only that time is forgiven, so that a
        process that is always slow still notices who is gone."""
        for instance_id, seen_s in self._seen_s.items():
            self._seen_s[instance_id] = min(seen_s + lag_s, now_s)

    def note_reconnected(self, now_s: float) -> None:
        self._no_sweep_until_s = now_s + self._heartbeat_timeout_s

    def get(self, instance_id: InstanceId) -> Heartbeat | None:
        """The last heartbeat of a known instance; inside a lost callback still that of the lost one."""
        return self._beats.get(instance_id)

    def has_ended(self, instance_id: InstanceId) -> bool:
        """Whether its end was told (Lost): it never comes back. Silence is no end."""
        return instance_id in self._ended

    async def find(self, instance_id: InstanceId) -> Heartbeat | None:
        """`get`, for one that must be there because somebody named it: waits up to heartbeat_timeout_s for a heartbeat, since a
        process that has just started has not heard everybody yet. None at once when it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_timeout_s):
                while instance_id not in self._beats and instance_id not in self._ended:
                    await self._next_change()
        return self.get(instance_id)

    async def _next_change(self) -> None:
        self._changed.clear()  # every waiter looks again after each event, so sharing one is safe
        await self._changed.wait()

    def all(self) -> list[Heartbeat]:
        return list(self._beats.values())

    def ready(self, *, service: Service | None = None, role: Role | None = None) -> list[Heartbeat]:
        """Instances in state ready, of that service and role."""
        return [
            beat
            for beat in self._beats.values()
            if beat.state == "ready" and (service is None or beat.service == service) and (role is None or role in beat.roles)
        ]

    def on_lost(self, callback: Callable[[InstanceId], None]) -> None:
        """callback runs once for each instance that was lost, left, or went silent, also for one never heard of."""
        self._lost_callbacks.append(callback)

    def off_lost(self, callback: Callable[[InstanceId], None]) -> None:
        """It runs no more, and is let go of."""
        self._lost_callbacks.remove(callback)

    async def wait_ready(
        self, timeout_s: float, *, service: Service | None = None, role: Role | None = None
    ) -> list[Heartbeat]:
        """`ready(...)`, waiting for the first one; [] after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := self.ready(service=service, role=role)):
                    await self._next_change()
        except TimeoutError:
            return []
        return found
