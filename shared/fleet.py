"""Many services in one process, each with an id, a port and a life of its own. They share one connection to the bus, and what
it tells them of others. For emulated instances, which cost next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import uvloop

from triptych.shared.bus import Bus
from triptych.shared.errors import TriptychError
from triptych.shared.http_host import listening_socket, resolve_host, url_of
from triptych.shared.logs import configure_logs
from triptych.shared.messages import InstanceId
from triptych.shared.registry import Registry
from triptych.shared.service import STOP_SIGNALS, Pulse, ServiceApp, ServiceContext, ServiceHost
from triptych.shared.settings import Settings

Members = Mapping[str, Callable[[Settings], ServiceApp]]
"""By slot name, how each service is made."""
FILES = 64  # chosen: of the process, besides those of its members
FILES_PER_MEMBER = 4  # chosen: a port to listen on, and probes and metrics that are being asked

_log = structlog.get_logger(__name__)


def names_of(counts: Mapping[str, int]) -> list[str]:
    """Slot names of so many instances of each stage."""
    return [f"{stage}-{index}" for stage, count in counts.items() for index in range(count)]


def member_id(name: str, process_id: InstanceId) -> InstanceId:
    """The instance id of a member: those of one process share its incarnation."""
    return InstanceId(f"{name}-{process_id.rpartition('-')[2]}")


def run_fleet(process_id: InstanceId, settings: Settings, members: Members) -> int:
    """Run until all members have left: each when it is drained, all on SIGTERM or SIGINT. When one can't start, all leave.
    The process's exit status."""
    configure_logs(settings, process_id)
    _allow_files(FILES + FILES_PER_MEMBER * len(members))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(process_id, settings, members))
    except TriptychError as error:
        _log.error(f"could not start: {error.message}", code=error.code)
        return 1


def _allow_files(count: int) -> None:
    """Many systems let a process open 1024 at first, and more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _run(process_id: InstanceId, settings: Settings, members: Members) -> int:
    bind_host = resolve_host(settings.bind_host)
    bus = await Bus.connect(settings.nats_url, process_id)
    try:
        ids = {name: member_id(name, process_id) for name in members}
        registry = Registry(settings.heartbeat_timeout_s, next(iter(ids.values())))
        pulse = Pulse(bus, registry, settings.heartbeat_interval_s, len(members))
        await pulse.join()
        contexts = [ServiceContext(settings, id_, name, bus, registry, "", bind_host) for name, id_ in ids.items()]
        hosts = [ServiceHost(context, members[context.name](settings), pulse) for context in contexts]
        return await _Fleet(pulse, list(zip(contexts, hosts, strict=True))).run()
    finally:
        await bus.close()


@dataclass(slots=True)
class _Fleet:
    pulse: Pulse
    members: list[tuple[ServiceContext, ServiceHost]]
    is_stopping: bool = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        async with asyncio.TaskGroup() as tasks:
            pulsing = tasks.create_task(self.pulse.run(), name="pulse")
            async with asyncio.TaskGroup() as group:
                lives = [group.create_task(self._live(*member), name=member[0].name) for member in self.members]
            pulsing.cancel()
        return max(life.result() for life in lives)

    async def _live(self, context: ServiceContext, host: ServiceHost) -> int:
        with contextlib.closing(listening_socket(context.bind_host, 0)) as listener:
            context.http_url = url_of(listener)
            exit_code = await host.live(listener)
        await context.bus.stop_serving(context.instance_id)
        if exit_code:
            self._stop()
        return exit_code

    def _on_signal(self) -> None:
        if self.is_stopping:
            os._exit(1)  # asked twice: whoever waits for us has no patience left
        self._stop()

    def _stop(self) -> None:
        self.is_stopping = True
        for context, _ in self.members:
            context.lifecycle.begin_drain(exit=True)
