"""`triptych up`: servers and stages as child processes, until Ctrl-C. Starts, waits until ready, tells, stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import uvloop

from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.embedded import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.services.launcher.plan import Counts, PlannedSlot, num_engine_instances, plan_slots, serve_spec
from triptych.services.launcher.run_file import RunAnnouncement, announce_run
from triptych.shared.bus import Bus
from triptych.shared.errors import TriptychError
from triptych.shared.messages import HEARTBEAT_SUBJECT, LOST_SUBJECT, Event, Heartbeat, InstanceId, Resources
from triptych.shared.process_memory import pss_bytes
from triptych.shared.registry import Registry
from triptych.shared.service_app import new_instance_id
from triptych.shared.settings import Settings

READY_POLL_S = 0.1  # chosen: adds half of it to ready_s on average
READY_TIMEOUT_S = 2.0  # chosen: one look at /ready
KILL_AFTER_S = 5.0  # chosen: on top of a drain's own bound
RUN_PREFIX = "triptych-up-"


class UpInfo(msgspec.Struct, frozen=True):
    """The JSON line of `triptych up --json`."""

    url: str
    ready_s: float
    pss_bytes: int
    pids: dict[str, int]
    nats_url: str
    redis_url: str
    model: str
    random_weights: bool


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `up` has besides the settings. tell: a line for the user (stderr). log_dir: keep the logs there; None: in the
    run's temporary folder, which is removed at the end."""

    counts: Counts
    ready_timeout_s: float
    is_json: bool
    tell: Callable[[str], None]
    log_dir: Path | None = None


class StartFailedError(Exception):
    """A child ended, or nothing was ready in time. The text is for the user."""


def run_up(settings: Settings, options: UpOptions) -> int:
    """The exit status: 0 after Ctrl-C or SIGTERM, 1 when the start failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Up(settings, options).run())


def _remove_stale_runs() -> None:
    """Folders of runs that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*"):
        pid = folder.name.removeprefix(RUN_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Up:
    """One run of `triptych up`."""

    settings: Settings
    options: UpOptions
    launcher: LocalLauncher = field(init=False)
    registry: Registry = field(init=False)
    bus: Bus | None = None
    beater: asyncio.Task[None] | None = None
    instance_id: InstanceId = field(default_factory=lambda: new_instance_id("launcher"))
    begin_s: float = field(default_factory=time.monotonic)
    asked_to_stop: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Future[str] = field(init=False)
    slots: list[PlannedSlot] = field(default_factory=list)
    is_ready: bool = False
    told_ready: set[InstanceId] = field(default_factory=set)
    router_port: int = 0

    async def run(self) -> int:
        self.launcher = LocalLauncher(self._on_exit)
        self.registry = Registry(self.settings.heartbeat_timeout_s)
        self.failed = asyncio.get_running_loop().create_future()
        self.slots = plan_slots(self.options.counts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        _remove_stale_runs()
        folder = Path(tempfile.mkdtemp(prefix=f"{RUN_PREFIX}{os.getpid()}-"))
        announced: RunAnnouncement | None = None
        try:
            info = await self._start_or_stop(folder)
            if info is not None:
                announced = announce_run(info.url, info.nats_url)
                self._tell_ready(info, folder)
                await self.asked_to_stop.wait()
            return 0
        except (StartFailedError, TriptychError) as error:
            self.options.tell(f"error: {error}")
            return 1
        finally:
            if announced is not None:
                announced.withdraw()
            await self._stop()
            shutil.rmtree(folder, ignore_errors=True)

    def _on_signal(self) -> None:
        if self.asked_to_stop.is_set():
            self.options.tell("killing everything")
            self.launcher.kill_all()
        self.asked_to_stop.set()

    async def _start_or_stop(self, folder: Path) -> UpInfo | None:
        """None when the user stopped it before it was ready."""
        starting = asyncio.create_task(self._start(folder), name="start")
        stopping = asyncio.create_task(self.asked_to_stop.wait(), name="stop")
        try:
            async with asyncio.timeout(self.options.ready_timeout_s):
                await asyncio.wait((starting, stopping, self.failed), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            waited = ", ".join(slot.name for slot in self.slots if slot.name not in self._ready_names())
            raise StartFailedError(f"not ready after {self.options.ready_timeout_s:.0f} s: {waited or 'the router'}") from None
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
        if self.failed.done() and not self.asked_to_stop.is_set():
            raise StartFailedError(self.failed.result())
        return None if self.asked_to_stop.is_set() else starting.result()

    async def _start(self, folder: Path) -> UpInfo:
        logs = self.options.log_dir or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.options.tell(f"logs: {logs}")
        nats_url = self.settings.nats_url or await self._start_server(EmbeddedNats, folder, logs)
        redis_url = self.settings.redis_url or await self._start_server(EmbeddedValkey, folder, logs)
        engines = num_engine_instances(self.options.counts)
        update: dict[str, object] = {"nats_url": nats_url, "redis_url": redis_url}
        if "engine_instances" not in self.settings.model_fields_set:
            update["engine_instances"] = engines
        self.settings = self.settings.model_copy(update=update)
        self.bus = await Bus.connect(nats_url, self.instance_id)
        self.launcher.use_bus(self.bus)
        for subject in (HEARTBEAT_SUBJECT, LOST_SUBJECT):
            await self.bus.listen(subject, self._on_event)
        await self.bus.serve(self.instance_id, self.launcher.handle)
        self.beater = asyncio.create_task(self._beat_forever(), name="heartbeat")
        self.router_port = self.settings.port
        for planned in self.slots:
            await self.launcher.start(self._slot(planned, logs))
        url = await self._until_ready()
        return self._info(url)

    async def _start_server(self, kind: type[EmbeddedServer], folder: Path, logs: Path) -> str:
        own = folder / kind.name
        own.mkdir()
        server = kind(own)
        child = await self.launcher.start(Slot(kind.name, lambda _: server.spec(), self._log(kind.name, logs), is_own=True))
        await server.wait_ready(child.pid)
        return server.url

    def _slot(self, planned: PlannedSlot, logs: Path) -> Slot:
        def make_spec(instance_id: InstanceId) -> ChildSpec:
            port = self.router_port if planned.name == "router-0" else None
            return serve_spec(planned, self.settings, port, instance_id)

        return Slot(planned.name, make_spec, self._log(planned.name, logs), is_own=planned.stage == "scaler")

    def _log(self, name: str, logs: Path) -> ChildLog:
        is_chosen = "log_level" in self.settings.model_fields_set
        level = self.settings.log_level.upper() if is_chosen else "WARNING"
        return ChildLog(name, logs / f"{name}.log", logging.getLevelNamesMapping()[level], self.options.tell)

    def _on_exit(self, slot: Slot, status: int) -> None:
        """A process ended by itself: fatal before everything was ready, a loss to repair after."""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        if not self.is_ready and not self.failed.done():
            last = "\n  ".join(slot.log.last_lines) or "(it printed nothing)"
            self.failed.set_result(f"{slot.name} ended with {how} before it was ready; its last lines:\n  {last}")
        elif status != 0:
            self.options.tell(f"{slot.name} ended with {how}")

    def _on_event(self, event: Event) -> None:
        self.registry.on_event(event, time.monotonic())
        if not isinstance(event, Heartbeat) or event.state != "ready" or event.instance_id in self.told_ready:
            return
        self.told_ready.add(event.instance_id)
        if event.name == "router-0":
            self.router_port = urlsplit(event.http_url).port or 0  # a router started again keeps its address
        if event.service != "launcher" and sys.stderr.isatty():
            self.options.tell(f"{time.monotonic() - self.begin_s:6.1f} s  {event.name} is ready")

    def _ready_names(self) -> set[str]:
        return {beat.name for beat in self.registry.ready()}

    async def _until_ready(self) -> str:
        """The router's URL, once it says that all stages are there."""
        expected = {slot.name for slot in self.slots}
        async with httpx.AsyncClient(timeout=READY_TIMEOUT_S, trust_env=False) as client:
            while True:
                routers = [beat for beat in self.registry.all() if beat.name == "router-0"]
                if routers and expected <= self._ready_names():
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{routers[0].http_url}/ready")).status_code == 200:
                            return routers[0].http_url
                await asyncio.sleep(READY_POLL_S)

    def _info(self, url: str) -> UpInfo:
        pids = self.launcher.pids()
        cards = [beat.model for beat in self.registry.all() if beat.model is not None]
        self.is_ready = True
        return UpInfo(
            url=url,
            ready_s=round(time.monotonic() - self.begin_s, 3),
            pss_bytes=sum(pss_bytes(pid) for pid in (os.getpid(), *pids.values())),
            pids=pids,
            nats_url=self.settings.nats_url,
            redis_url=self.settings.redis_url,
            model=cards[0].name if cards else self.settings.model_name,
            random_weights=any(card.random_weights for card in cards),
        )

    def _tell_ready(self, info: UpInfo, folder: Path) -> None:
        if self.options.is_json:
            sys.stdout.write(msgspec.json.encode(info).decode() + "\n")
            sys.stdout.flush()
            return
        note = " (random weights: the answers are noise)" if info.random_weights else ""
        body = f'{{"model": "{info.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        sys.stdout.write(
            f"\nTriptych serves {info.model}{note}\n"
            f"  {info.url}/v1  ready in {info.ready_s:.1f} s, {info.pss_bytes / 1e6:.0f} MB in {len(info.pids)} processes\n\n"
            f"  curl {info.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
            "Ctrl-C stops everything.\n"
        )
        sys.stdout.flush()

    async def _beat_forever(self) -> None:
        """So that the scaler finds the launcher."""
        assert self.bus is not None
        while True:
            if self.bus.is_connected:
                self.registry.sweep(time.monotonic())
                await self.bus.publish_event(HEARTBEAT_SUBJECT, self._heartbeat())
            await asyncio.sleep(self.settings.heartbeat_interval_s)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            instance_id=self.instance_id,
            name="launcher",
            service="launcher",
            state="ready",
            roles=(),
            http_url="",
            interval_s=self.settings.heartbeat_interval_s,
            host=socket.gethostname(),
            loads=(),
            resources=Resources(pid=os.getpid(), num_threads=1, pss_bytes=pss_bytes(os.getpid())),
        )

    async def _stop(self) -> None:
        """Routers first, they drain while the stages still work; servers last."""
        bound_s = self.settings.drain_timeout_s + KILL_AFTER_S
        routers = [slot.name for slot in self.slots if slot.stage == "router"]
        others = [slot.name for slot in self.slots if slot.stage != "router"]
        await self.launcher.stop(routers, bound_s)
        await self.launcher.stop(others, bound_s)
        if self.beater is not None:
            self.beater.cancel()
        if self.bus is not None:
            await self.bus.close()
        await self.launcher.stop([EmbeddedValkey.name, EmbeddedNats.name], KILL_AFTER_S)
