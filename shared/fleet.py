"""Many services in one process, each with an id, a port and a life of its own. They share one connection to the bus, and what
it tells them of others. For emulated instances, which cost next to nothing. The process starts more of them when asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
import uvloop

from triptych.shared.bus import Bus
from triptych.shared.errors import InternalError, Overloaded, TriptychError
from triptych.shared.http_host import listening_socket, resolve_host, url_of
from triptych.shared.logs import configure_logs
from triptych.shared.messages import InstanceId, InstanceRequest, Launched, Message, ScaleOutRequest
from triptych.shared.registry import Registry
from triptych.shared.service import STOP_SIGNALS, Pulse, ServiceApp, ServiceContext, ServiceHost
from triptych.shared.settings import Settings

Make = Callable[[Settings], ServiceApp]
Members = Mapping[str, Make]
"""By slot name, how each service is made."""
MakeMore = Callable[[str, str], Make]
"""How one more of a kind is made, for a group."""
MAX_MEMBERS = 1024  # chosen: a policy gone wild must not fill the process
FILES = 64  # chosen: of the process, besides those of its members
FILES_PER_MEMBER = 4  # chosen: a port to listen on, and probes and metrics that are being asked

_log = structlog.get_logger(__name__)


def names_of(counts: Mapping[str, int]) -> list[str]:
    """Slot names of so many instances of each stage."""
    return [f"{stage}-{index}" for stage, count in counts.items() for index in range(count)]


def member_id(name: str, process_id: InstanceId) -> InstanceId:
    """The instance id of a member: those of one process share its incarnation."""
    return InstanceId(f"{name}-{process_id.rpartition('-')[2]}")


def run_fleet(process_id: InstanceId, settings: Settings, members: Members, make_more: MakeMore) -> int:
    """Run until all members have left: each when it is drained, all on SIGTERM or SIGINT. When one can't start, all leave.
    One more comes by a ScaleOutRequest to process_id. The process's exit status."""
    configure_logs(settings, process_id)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(live_together(process_id, settings, members, make_more))
    except TriptychError as error:
        _log.error(f"could not start: {error.message}", code=error.code)
        return 1


def _allow_files(count: int) -> None:
    """Many systems let a process open 1024 at first, and more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def live_together(process_id: InstanceId, settings: Settings, members: Members, make_more: MakeMore) -> int:
    """As run_fleet, in a running event loop. Raises TriptychError: there is no bus."""
    bind_host = resolve_host(settings.bind_host)
    bus = await Bus.connect(settings.nats_url, process_id)
    try:
        registry = Registry(settings.heartbeat_timeout_s, member_id(next(iter(members)), process_id))
        pulse = Pulse(bus, registry, settings.heartbeat_interval_s, len(members))
        await pulse.join()

        def host(name: str, make: Make) -> ServiceHost:
            context = ServiceContext(settings, member_id(name, process_id), name, bus, registry, "", bind_host)
            return ServiceHost(context, make(settings), pulse)

        return await _Fleet(process_id, pulse, host, make_more).run(bus, members)
    finally:
        await bus.close()


@dataclass(slots=True)
class _Fleet:
    """members: those that have not left. num_made: of each kind, so that no name comes twice: an id that has left never comes
    back."""

    process_id: InstanceId
    pulse: Pulse
    make_host: Callable[[str, Make], ServiceHost]
    make_more: MakeMore
    members: dict[str, ServiceHost] = field(default_factory=dict)
    num_made: Counter[str] = field(default_factory=Counter)
    exit_code: int = 0
    is_stopping: bool = False
    _lives: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def run(self, bus: Bus, members: Members) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        async with asyncio.TaskGroup() as tasks:
            pulsing = tasks.create_task(self.pulse.run(), name="pulse")
            async with self._lives:
                for name, make in members.items():
                    self._add(name, make)
                await bus.serve(self.process_id, self.handle)
            pulsing.cancel()
        return self.exit_code

    async def handle(self, request: InstanceRequest) -> Message:
        """Raises Overloaded: there are too many, or all are about to leave."""
        if not isinstance(request, ScaleOutRequest):
            raise InternalError(f"a fleet has no use for a {type(request).__name__}", code="invalid_message")
        if self.is_stopping or not 0 < len(self.members) < MAX_MEMBERS:
            raise Overloaded("no instances can be added now", code="slot_busy")
        name = f"{request.kind}-{self.num_made[request.kind]}"
        self._add(name, self.make_more(request.kind, request.group))
        return Launched(name)

    def _add(self, name: str, make: Make) -> None:
        self.num_made[name.rpartition("-")[0]] += 1
        host = self.members[name] = self.make_host(name, make)
        _allow_files(FILES + FILES_PER_MEMBER * len(self.members))
        self._lives.create_task(self._live(name, host), name=name)

    async def _live(self, name: str, host: ServiceHost) -> None:
        context = host.context
        with contextlib.closing(listening_socket(context.bind_host, 0)) as listener:
            context.http_url = url_of(listener)
            exit_code = await host.live(listener)
        await context.bus.stop_serving(context.instance_id)
        del self.members[name]
        if exit_code:
            self.exit_code = max(self.exit_code, exit_code)
            self._stop()

    def _on_signal(self) -> None:
        if self.is_stopping:
            os._exit(1)  # asked twice: whoever waits for us has no patience left
        self._stop()

    def _stop(self) -> None:
        self.is_stopping = True
        for host in self.members.values():
            host.context.lifecycle.begin_drain(exit=True)
