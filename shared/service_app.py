"""What a stage implements and what it is given: `ServiceApp`, `Report`, `ServiceContext`. Import them from service.py."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from triptych.shared.bus import Bus
from triptych.shared.instance_info import Demand, ModelCard, Resources, StageLoad, TransportAddress
from triptych.shared.messages import InstanceId, InstanceRequest, Message, Role, Service, State
from triptych.shared.registry import Registry
from triptych.shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Report:
    """A service's own part of its heartbeat. Of resources, pid, num_threads and pss_bytes are filled in by the frame."""

    loads: tuple[StageLoad, ...] = ()
    resources: Resources | None = None
    roles: tuple[Role, ...] = ()
    model: ModelCard | None = None
    transport: TransportAddress | None = None
    demand: dict[str, Demand] = field(default_factory=dict)
    group: str = ""
    takes_follow_ups: bool = False


async def _unheard() -> None:
    """Nobody listens to a service that no frame runs."""


class ServiceApp(Protocol):
    """What a stage implements; `run_service` does the rest."""

    service: Service
    app: FastAPI  # run_service adds /live /ready /health /metrics unless the app has them

    async def start(self, context: ServiceContext) -> None:
        """Load what is needed. The service is `ready` when this returns. Bus and registry already work."""
        ...

    async def handle(self, request: InstanceRequest) -> Message | None:
        """A request that came over the bus."""
        ...

    def report(self) -> Report: ...

    def on_router_lost(self, router_id: InstanceId) -> None:
        """Free everything that this router's requests hold."""
        ...

    def is_idle(self) -> bool:
        """Nothing waits or runs: draining may end."""
        ...

    async def stop(self) -> None: ...


class Lifecycle:
    """starting -> ready -> draining or failing -> drained (-> exit). Event loop only."""

    def __init__(self) -> None:
        self.state: State = "starting"
        self.is_wanted_gone = False  # a DrainRequest asked for the exit
        self.exit_code = 0
        self.drain_asked = asyncio.Event()
        self.exit_asked = asyncio.Event()
        self.drained = asyncio.Event()

    def begin_drain(self, exit: bool) -> None:
        """Idempotent; a drain without exit can still be told to exit."""
        if self.state != "failing":
            self.state = "draining"
        self.drain_asked.set()
        if exit:
            self.exit_asked.set()

    def give_up(self) -> None:
        """What the service needs is broken for good: take no new work, end what runs, exit as a process that crashed."""
        self.state, self.exit_code = "failing", 1
        self.begin_drain(exit=True)


@dataclass(slots=True)
class ServiceContext:
    """What a running service has in hand. metrics: where it registers its own. announce: publishes a heartbeat now, for what
    others should not learn a moment later."""

    settings: Settings
    instance_id: InstanceId
    name: str
    bus: Bus
    registry: Registry
    http_url: str
    bind_host: str
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    announce: Callable[[], Awaitable[None]] = _unheard
    _lost_callbacks: list[Callable[[InstanceId], None]] = field(default_factory=list)

    def on_lost(self, callback: Callable[[InstanceId], None]) -> None:
        """As Registry.on_lost, as long as this service lives: others of its process may outlive it."""
        self.registry.on_lost(callback)
        self._lost_callbacks.append(callback)

    def leave_registry(self) -> None:
        """The service has ended: its callbacks run no more, and nothing of it is kept for them."""
        while self._lost_callbacks:
            self.registry.off_lost(self._lost_callbacks.pop())

    @property
    def is_draining(self) -> bool:
        return self.lifecycle.drain_asked.is_set()

    async def drain(self, exit: bool = True) -> None:
        """Refuse new work (heartbeat state draining), wait until idle or drain_timeout_s, then exit."""
        self.lifecycle.begin_drain(exit)
        await self.lifecycle.drained.wait()


def new_instance_id(name: str) -> InstanceId:
    """A new incarnation of slot `name`."""
    return InstanceId(f"{name}-{secrets.token_hex(4)}")
