"""Has local processes that ended started again: decides by shared/policies/restart.py and asks the launcher, which is found by
its heartbeat; without one (containers) restarting is the container runtime's job.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import structlog
from prometheus_client import Counter

from triptych.shared.errors import TriptychError
from triptych.shared.messages import Event, InstanceId, LaunchRequest, Lost
from triptych.shared.policies.restart import decide_restart
from triptych.shared.service import ServiceContext

LAUNCH_TIMEOUT_S = 5.0  # chosen: a launcher answers before the process is up
NUM_CRASHES_KEPT = 32  # chosen: per slot; more than the policy looks at
NUM_REMEMBERED = 1024  # chosen: ended instances whose restart was asked for, and slots (a container's has a new name)

_log = structlog.get_logger(__name__)


class Restarts:
    """Lost is told again every second until the slot runs, so a failed or missed request is made good. count: how many were
    made."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._crashes_s: dict[str, deque[float]] = {}
        self._seen: deque[InstanceId] = deque(maxlen=NUM_REMEMBERED)
        self._handled: deque[InstanceId] = deque(maxlen=NUM_REMEMBERED)
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._counter = Counter("triptych_restarts", "processes started again", ["slot"], registry=context.metrics)
        self.count = 0

    def on_event(self, event: Event) -> None:
        """Of LOST_SUBJECT."""
        if not isinstance(event, Lost) or event.instance_id in self._handled or event.name in self._restarting:
            return
        now_s = time.monotonic()
        crashes_s = self._crashes_s.setdefault(event.name, deque(maxlen=NUM_CRASHES_KEPT))
        if len(self._crashes_s) > NUM_REMEMBERED:
            del self._crashes_s[next(iter(self._crashes_s))]
        if not event.expected and event.instance_id not in self._seen:
            self._seen.append(event.instance_id)
            crashes_s.append(now_s)
        decision = decide_restart(event.expected, crashes_s, now_s)
        if decision.delay_s is None:
            self._handled.append(event.instance_id)  # that was its own last word; the launcher's may come after it
            return
        _log.info("restart", slot=event.name, exit_code=event.exit_code, delay_s=decision.delay_s, reason=decision.reason)
        task = asyncio.create_task(self._restart(event, decision.delay_s), name=f"restart {event.name}")
        self._restarting[event.name] = task
        task.add_done_callback(lambda _: self._restarting.pop(event.name, None))

    async def _restart(self, lost: Lost, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        launchers = self._context.registry.ready(service="launcher")
        if not launchers:
            _log.info("no launcher: left to whoever runs the process", slot=lost.name)
            return
        try:
            await self._context.bus.request(launchers[0].instance_id, LaunchRequest(lost.name), LAUNCH_TIMEOUT_S)
        except TriptychError as error:
            _log.info("not restarted yet", slot=lost.name, reason=error.message)
            return
        self._handled.append(lost.instance_id)
        self.count += 1
        self._counter.labels(lost.name).inc()

    def stop(self) -> None:
        for task in tuple(self._restarting.values()):
            task.cancel()
