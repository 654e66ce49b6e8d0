"""Who is there: the recent heartbeats of all processes (soft state, nothing is stored anywhere).

SIGNATURES ONLY for now; the body is being written.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.shared.messages import Event, Heartbeat, InstanceId, Role, Service


class Registry:
    """Fed by on_event with Heartbeat and Lost; sweep() drops the silent. Not thread-safe: event loop only."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        raise NotImplementedError

    def on_event(self, event: Event, now_s: float) -> None:
        """now_s: time.monotonic() of the caller."""
        raise NotImplementedError

    def sweep(self, now_s: float) -> None:
        """Forget instances silent for longer than heartbeat_timeout_s (their lost callbacks run). Skipped for one timeout
        after the bus was disconnected (note_reconnected): our own silence is not theirs."""
        raise NotImplementedError

    def note_reconnected(self, now_s: float) -> None:
        raise NotImplementedError

    def get(self, instance_id: InstanceId) -> Heartbeat | None:
        raise NotImplementedError

    def all(self) -> list[Heartbeat]:
        raise NotImplementedError

    def ready(self, *, service: Service | None = None, role: Role | None = None) -> list[Heartbeat]:
        """Instances in state ready, of that service and role."""
        raise NotImplementedError

    def on_lost(self, callback: Callable[[InstanceId], None]) -> None:
        """callback runs once for each instance that was lost, left, or went silent."""
        raise NotImplementedError

    async def wait_ready(
        self, timeout_s: float, *, service: Service | None = None, role: Role | None = None
    ) -> list[Heartbeat]:
        """`ready(...)`, waiting for the first one; [] after timeout_s."""
        raise NotImplementedError
