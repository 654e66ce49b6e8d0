"""The scaler: watches heartbeats, has local processes that ended started again, answers what the cluster looks like.

It decides by shared/policies/restart.py and asks the launcher, which is found by its heartbeat; without one (containers)
restarting is the container runtime's job.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import structlog
from fastapi import FastAPI
from prometheus_client import Counter

from triptych.shared.errors import InternalError, TriptychError
from triptych.shared.messages import (
    LOST_SUBJECT,
    Event,
    InstanceId,
    InstanceRequest,
    LaunchRequest,
    Lost,
    Message,
    Service,
    StatusReply,
    StatusRequest,
)
from triptych.shared.policies.restart import decide_restart
from triptych.shared.service import Report, ServiceApp, ServiceContext
from triptych.shared.settings import Settings

LAUNCH_TIMEOUT_S = 5.0  # chosen: a launcher answers before the process is up
NUM_CRASHES_KEPT = 32  # chosen: per slot; more than the policy looks at
NUM_REMEMBERED = 1024  # chosen: ended instances whose restart was asked for, and slots (a container's has a new name)

_log = structlog.get_logger(__name__)


class Scaler:
    """One per cluster. Lost is told again every second until the slot runs, so a failed or missed request is made good."""

    service: Service = "scaler"

    def __init__(self) -> None:
        self.app = FastAPI(title="Triptych scaler", openapi_url=None)
        self._crashes_s: dict[str, deque[float]] = {}
        self._seen: deque[InstanceId] = deque(maxlen=NUM_REMEMBERED)
        self._handled: deque[InstanceId] = deque(maxlen=NUM_REMEMBERED)
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._num_restarts = 0
        self._context: ServiceContext | None = None

    async def start(self, context: ServiceContext) -> None:
        self._context = context
        self._restarts = Counter("triptych_restarts", "processes started again", ["slot"], registry=context.metrics)
        await context.bus.listen(LOST_SUBJECT, self._on_event)

    async def handle(self, request: InstanceRequest) -> Message | None:
        if not isinstance(request, StatusRequest):
            raise InternalError(f"the scaler has no use for a {type(request).__name__}", code="invalid_message")
        assert self._context is not None
        beats = (beat for beat in self._context.registry.all() if beat.service != "launcher")
        return StatusReply(tuple(beats), self._num_restarts)

    def _on_event(self, event: Event) -> None:
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
        assert self._context is not None
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
        self._num_restarts += 1
        self._restarts.labels(lost.name).inc()

    def report(self) -> Report:
        return Report()

    def on_router_lost(self, router_id: InstanceId) -> None:
        """The scaler holds nothing of requests."""

    def is_idle(self) -> bool:
        return True

    async def stop(self) -> None:
        for task in tuple(self._restarting.values()):
            task.cancel()


def make_service(settings: Settings) -> ServiceApp:
    """The scaler needs no settings of its own."""
    return Scaler()
