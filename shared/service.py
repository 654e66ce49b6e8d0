"""What every process does: connect the bus, publish heartbeats, keep the registry, serve HTTP, drain on SIGTERM.

SIGNATURES ONLY for now; the body is being written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI

from triptych.shared.bus import Bus
from triptych.shared.messages import (
    Heartbeat,
    InstanceId,
    InstanceRequest,
    Message,
    ModelCard,
    Resources,
    Role,
    Service,
    StageLoad,
    TransportAddress,
)
from triptych.shared.registry import Registry
from triptych.shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Report:
    """A service's own part of its heartbeat."""

    loads: tuple[StageLoad, ...] = ()
    resources: Resources | None = None
    roles: tuple[Role, ...] = ()
    model: ModelCard | None = None
    transport: TransportAddress | None = None


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


@dataclass(slots=True)
class ServiceContext:
    """What a running service has in hand."""

    settings: Settings
    instance_id: InstanceId
    name: str
    bus: Bus
    registry: Registry
    http_url: str
    bind_host: str

    @property
    def is_draining(self) -> bool:
        raise NotImplementedError

    async def drain(self, exit: bool = True) -> None:
        """Refuse new work (heartbeat state draining), wait until idle or drain_timeout_s, then exit."""
        raise NotImplementedError


def run_service(name: str, settings: Settings, make: Callable[[Settings], ServiceApp]) -> int:
    """Run until SIGTERM or SIGINT (drain, then exit 0; a second signal exits at once). The process's exit status."""
    raise NotImplementedError


__all__ = ["Awaitable", "Heartbeat", "Report", "ServiceApp", "ServiceContext", "run_service"]
