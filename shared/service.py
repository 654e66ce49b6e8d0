"""What every process does: connect the bus, publish heartbeats, keep the registry, serve HTTP, drain on SIGTERM.

A stage implements `ServiceApp` (service_app.py, exported here too); `run_service` runs it as a process until it is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable

import msgspec
import structlog
import uvloop

from triptych.shared.bus import Bus
from triptych.shared.errors import TriptychError
from triptych.shared.http_host import (
    QuietServer,
    add_probes,
    gate_until_started,
    listening_socket,
    make_server,
    resolve_host,
    url_of,
)
from triptych.shared.instance_info import Resources
from triptych.shared.logs import configure_logs
from triptych.shared.messages import (
    HEARTBEAT_SUBJECT,
    LOST_SUBJECT,
    Accepted,
    DrainRequest,
    Heartbeat,
    InstanceId,
    InstanceRequest,
    Lost,
    Message,
)
from triptych.shared.metrics import watch_process
from triptych.shared.nats_link import BusCounters
from triptych.shared.process_memory import family_pss_bytes
from triptych.shared.registry import Registry
from triptych.shared.service_app import Lifecycle, Report, ServiceApp, ServiceContext, new_instance_id
from triptych.shared.settings import Settings

PSS_INTERVAL_S = 5.0  # chosen: smaps_rollup of a large process takes milliseconds
IDLE_POLL_S = 0.05  # chosen: how often a draining process looks whether it is idle
STALL_FACTOR = 3.0  # chosen: a beat that comes this many intervals late means that we were stopped, not the others
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_TIMEOUT_S = 10.0  # chosen: a service that can't stop in this time is left behind

__all__ = ["Report", "ServiceApp", "ServiceContext", "new_instance_id", "run_service"]

_log = structlog.get_logger(__name__)


def run_service(
    name: str, settings: Settings, make: Callable[[Settings], ServiceApp], instance_id: InstanceId | None = None
) -> int:
    """Run until SIGTERM or SIGINT (drain, then exit 0; a second signal exits at once). The process's exit status."""
    configure_logs(settings, name)
    try:
        service = make(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(name, settings, service, instance_id or new_instance_id(name)))
    except TriptychError as error:
        _log.error(f"could not start: {error.message}", code=error.code)
        return 1


async def _run(name: str, settings: Settings, service: ServiceApp, instance_id: InstanceId) -> int:
    bind_host = resolve_host(settings.bind_host)
    has_own_port = service.service == "router" or "port" in settings.model_fields_set
    port = settings.port if has_own_port else 0
    with contextlib.closing(listening_socket(bind_host, port)) as listener:
        bus = await Bus.connect(settings.nats_url, instance_id)
        try:
            registry = Registry(settings.heartbeat_timeout_s, instance_id)
            context = ServiceContext(settings, instance_id, name, bus, registry, url_of(listener), bind_host)
            return await ServiceHost(context, service).run(listener)
        finally:
            await bus.close()


class Pulse:
    """What a process does once, however many services it runs: hears the others, forgets the silent, measures itself.
    num_services: that it starts with.
    pss_bytes: of the process and those that it started, shared out among its services."""

    def __init__(self, bus: Bus, registry: Registry, interval_s: float, num_services: int = 1) -> None:
        self._bus = bus
        self._registry = registry
        self._interval_s = interval_s
        self._num_services = self._num_starting = num_services
        self._pss_at_s = -PSS_INTERVAL_S
        self.pss_bytes = 0
        self.loop_lag_s = 0.0

    async def join(self) -> None:
        """The registry fills from now on."""
        self._registry.on_lost(self._bus.note_lost)
        self._bus.on_reconnected(lambda: self._registry.note_reconnected(time.monotonic()))
        for subject in (HEARTBEAT_SUBJECT, LOST_SUBJECT):
            await self._bus.listen(subject, lambda event: self._registry.on_event(event, time.monotonic()))
        await self._refresh_pss()

    def on_started(self) -> None:
        """Of each service. What start-up made stays: the collector's looking at it again would be a tenth of a router's work.
        What is made for services that come later ends with them."""
        self._num_starting -= 1
        if self._num_starting == 0:
            gc.collect()
            gc.freeze()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            self.loop_lag_s = now_s - begin_s - self._interval_s
            if self.loop_lag_s > STALL_FACTOR * self._interval_s:
                self._registry.note_stall(self.loop_lag_s, now_s)
            if self._bus.is_connected:
                self._registry.sweep(now_s)
            await self._refresh_pss()

    async def _refresh_pss(self) -> None:
        now_s = time.monotonic()
        if now_s - self._pss_at_s >= PSS_INTERVAL_S:
            self._pss_at_s = now_s
            self.pss_bytes = await asyncio.to_thread(family_pss_bytes) // self._num_services


class ServiceHost:
    """The frame around one service. pulse: its process's, when that runs others besides."""

    def __init__(self, context: ServiceContext, service: ServiceApp, pulse: Pulse | None = None) -> None:
        self.context = context
        self._service = service
        self._bus = context.bus
        self._lifecycle: Lifecycle = context.lifecycle
        self._pulse = pulse or Pulse(context.bus, context.registry, context.settings.heartbeat_interval_s)
        self.last_heartbeat: Heartbeat | None = None
        self._has_started = False
        context.announce = self._beat

    @property
    def bus_counters(self) -> BusCounters:
        return self._bus.counters

    @property
    def loop_lag_s(self) -> float:
        return self._pulse.loop_lag_s

    async def run(self, listener: socket.socket) -> int:
        """Have the process for itself; its exit status."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        await self._pulse.join()
        async with asyncio.TaskGroup() as tasks:
            pulsing = tasks.create_task(self._pulse.run(), name="pulse")
            exit_code = await self.live(listener)
            pulsing.cancel()
        return exit_code

    async def live(self, listener: socket.socket) -> int:
        """From its start until it has left; an exit status. The pulse has joined."""
        app = self._service.app
        watch_process(self.context.metrics, self)
        add_probes(app, lambda: self._lifecycle.state, self.context.instance_id, self.context.metrics)
        server = make_server(gate_until_started(app, lambda: self._lifecycle.state))
        self.context.on_lost(self._on_lost)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]), name="http")
            beating = tasks.create_task(self._beat_forever(), name="heartbeat")
            exit_code = await self._start()
            if exit_code is None:
                exit_code = await self._until_exit()
            beating.cancel()
            await self._leave(server, exit_code)
            await serving
        self.context.leave_registry()
        return exit_code

    def _on_signal(self) -> None:
        if self._lifecycle.exit_asked.is_set():
            os._exit(1)  # asked twice: whoever waits for us has no patience left
        self._lifecycle.begin_drain(exit=True)

    def _on_lost(self, instance_id: InstanceId) -> None:
        beat = self.context.registry.get(instance_id)
        may_be_router = beat is None or beat.service == "router"  # one never heard of may have been one
        is_other = instance_id != self.context.instance_id
        if may_be_router and is_other and self._has_started:
            self._service.on_router_lost(instance_id)

    async def _start(self) -> int | None:
        """None when the service is ready, else the exit status."""
        starting = asyncio.create_task(self._service.start(self.context), name="start")
        stopped = asyncio.create_task(self._lifecycle.exit_asked.wait(), name="exit asked")
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            await starting
        except TriptychError as error:
            _log.error(f"could not start: {error.message}", code=error.code)
            return 1
        except Exception as error:
            _log.exception(f"could not start: {type(error).__name__}: {error}")
            return 1
        finally:
            starting.cancel()
            stopped.cancel()
        self._has_started = True
        await self._bus.serve(self.context.instance_id, self._handle)
        if self._lifecycle.state == "starting":
            self._lifecycle.state = "ready"
        await self._beat()
        self._pulse.on_started()
        _log.info("ready", instance_id=self.context.instance_id, url=self.context.http_url)
        return None

    async def _handle(self, request: InstanceRequest) -> Message | None:
        if isinstance(request, DrainRequest):
            self._lifecycle.is_wanted_gone = request.exit
            self._lifecycle.begin_drain(request.exit)
            return Accepted()
        return await self._service.handle(request)

    async def _until_exit(self) -> int:
        await self._lifecycle.drain_asked.wait()
        _log.info("draining")
        await self._beat()
        try:
            async with asyncio.timeout(self.context.settings.drain_timeout_s):
                while not self._service.is_idle():  # noqa: ASYNC110 - asked of the service, which tells no event
                    await asyncio.sleep(IDLE_POLL_S)
        except TimeoutError:
            _log.warning("drain timeout: work is cut off", drain_timeout_s=self.context.settings.drain_timeout_s)
        self._lifecycle.drained.set()
        await self._lifecycle.exit_asked.wait()
        return self._lifecycle.exit_code

    async def _leave(self, server: QuietServer, exit_code: int) -> None:
        is_wanted = exit_code == 0 and self._lifecycle.is_wanted_gone
        lost = Lost(self.context.instance_id, self.context.name, exit_code, expected=is_wanted)
        await self._bus.publish_event(LOST_SUBJECT, lost)
        server.should_exit = True
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._service.stop()
        except TimeoutError:
            _log.warning("service did not stop in time", timeout_s=STOP_TIMEOUT_S)

    async def _beat_forever(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(self.context.settings.heartbeat_interval_s)

    async def _beat(self) -> None:
        """Not while disconnected: old heartbeats must not be sent late."""
        self.last_heartbeat = self._make_heartbeat()
        if self._bus.is_connected:
            await self._bus.publish_event(HEARTBEAT_SUBJECT, self.last_heartbeat)

    def _make_heartbeat(self) -> Heartbeat:
        context = self.context
        report = self._service.report() if self._has_started else Report()  # one that is told to leave may never start
        resources = msgspec.structs.replace(
            report.resources or Resources(pid=0, num_threads=0),
            pid=os.getpid(),
            num_threads=int(os.environ.get("OMP_NUM_THREADS") or 1),
            pss_bytes=self._pulse.pss_bytes,
        )
        return Heartbeat(
            instance_id=context.instance_id,
            name=context.name,
            service=self._service.service,
            state=self._lifecycle.state,
            roles=report.roles,
            http_url=context.http_url,
            interval_s=context.settings.heartbeat_interval_s,
            host=socket.gethostname(),
            loads=report.loads,
            resources=resources,
            model=report.model,
            transport=report.transport,
            demand=report.demand,
            group=report.group,
            takes_follow_ups=report.takes_follow_ups,
        )
