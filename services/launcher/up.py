"""`triptych up`: servers and stages as child processes, until Ctrl-C, or until the program that started it has ended. Starts,
waits until ready, tells, stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import uvloop

from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.embedded import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.services.launcher.plan import (
    EMULATED,
    Counts,
    PlannedSlot,
    instance_slot,
    plan_slots,
    serve_spec,
    template_env,
)
from triptych.services.launcher.presence import Presence
from triptych.services.launcher.run_file import RunAnnouncement, announce_run
from triptych.services.launcher.template import IS_SUPPORTED, Template
from triptych.shared.errors import TriptychError
from triptych.shared.instance_info import Emulation
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.process_memory import pss_bytes
from triptych.shared.settings import Settings

READY_POLL_S = 0.1  # chosen: adds half of it to ready_s on average
PROBE_TIMEOUT_S = 2.0  # chosen: one look at /ready
NUM_TRIES = 3  # chosen: a port may have been taken between choosing and binding, a template too slow; not three times in a row
KILL_AFTER_S = 5.0  # chosen: on top of a drain's own bound
COULD_NOT_START = "error: could not start: "  # how run_service logs it
RUN_PREFIX = "triptych-up-"
LOGS = "logs"
MAIN_ROUTER = "router-0"
STARTER_POLL_S = 0.5  # chosen: how soon the end of our starter is noticed


class UpInfo(msgspec.Struct, frozen=True):
    """The JSON line of `triptych up --json`. pss_bytes: of all processes, the launcher's own included. emulation: when no
    instance has a real engine."""

    url: str
    ready_s: float
    pss_bytes: int
    pids: dict[str, int]
    nats_url: str
    redis_url: str
    model: str
    random_weights: bool
    emulation: Emulation | None = None


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `up` has besides the settings. starter_pid: the program that reads our JSON line and whose end is ours too; None
    when a person reads along. tell: a line for the user (stderr). log_dir: keep the logs there; None: in the run's temporary
    folder, which is removed at the end; the next run removes those of a failed start."""

    counts: Counts
    ready_timeout_s: float
    starter_pid: int | None
    tell: Callable[[str], None]
    log_dir: Path | None = None


class StartFailedError(Exception):
    """A child ended, or nothing was ready in time. The text is for the user."""


def run_up(settings: Settings, options: UpOptions) -> int:
    """The exit status: 0 after Ctrl-C or SIGTERM, 1 when the start failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, options))


async def _run(settings: Settings, options: UpOptions) -> int:
    _remove_stale_runs()
    folder = Path(tempfile.mkdtemp(prefix=f"{RUN_PREFIX}{os.getpid()}-"))
    status = 1  # unless it says another one
    try:
        status = await Up(settings, options, folder).run()
    finally:
        _remove(folder, keep_logs=status != 0)
    return status


def _remove(folder: Path, keep_logs: bool) -> None:
    """Logs of a failed start are still to be read; the next run removes them."""
    for path in folder.iterdir():
        if not (keep_logs and path.name == LOGS):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_stale_runs() -> None:
    """Folders of runs that were killed before they could clean up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*"):
        pid = folder.name.removeprefix(RUN_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _why(slot: Slot, how: str) -> str:
    """A process's own reason not to start where it gave one, else the last that it printed."""
    lines = slot.log.last_lines
    if reason := next((line for line in lines if line.startswith(COULD_NOT_START)), ""):
        return f"{slot.name} {reason.removeprefix('error: ')}"
    last = "\n  ".join(lines) or "(it printed nothing)"
    return f"{slot.name} ended with {how} before it was ready; its last lines:\n  {last}"


class Up:
    """One run. folder: its temporary files, and its children's."""

    def __init__(self, settings: Settings, options: UpOptions, folder: Path) -> None:
        self._settings = settings
        self._options = options
        self._folder = folder
        self._logs = options.log_dir or folder / LOGS
        self._begin_s = time.monotonic()
        self._slots = plan_slots(options.counts, bool(settings.emulate))
        has_template = IS_SUPPORTED and not settings.emulate  # which would load torch
        self._template = Template(template_env(settings, folder / "tmp")) if has_template else None
        self._launcher = LocalLauncher(
            self._on_exit,
            self._template,
            lambda name, _, group: self._slot(instance_slot(name, group)),
            settings.max_instances,
        )
        self._presence: Presence | None = None
        self._router_port = settings.port
        self._asked_to_stop = asyncio.Event()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_ready = False

    async def run(self) -> int:
        """The exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_signal)
        watching = asyncio.create_task(self._watch_starter(), name="watch the starter")
        announced: RunAnnouncement | None = None
        try:
            info = await self._start_unless_stopped()
            if info is not None:
                announced = announce_run(info.url, info.nats_url)
                self._tell_ready(info)
                await self._asked_to_stop.wait()
            return 0
        except (StartFailedError, TriptychError) as error:
            self._options.tell(f"error: {error}")
            return 1
        finally:
            watching.cancel()
            if announced is not None:
                announced.withdraw()
            await self._stop()

    async def _watch_starter(self) -> None:
        """A killed program can't stop its cluster, which would go on for ever."""
        if (starter_pid := self._options.starter_pid) is None:
            return
        while os.getppid() == starter_pid:  # noqa: ASYNC110 - not our child: nobody tells us
            await asyncio.sleep(STARTER_POLL_S)
        self._options.tell("stopping: the program that started this cluster has ended")
        self._asked_to_stop.set()

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._options.tell("killing everything")
            self._launcher.kill_all()
        else:
            self._options.tell("stopping: running requests may end; Ctrl-C again kills")
        self._asked_to_stop.set()

    async def _start_unless_stopped(self) -> UpInfo | None:
        """None when the user stopped it before it was ready."""
        starting = asyncio.create_task(self._start(), name="start")
        stopping = asyncio.create_task(self._asked_to_stop.wait(), name="stop")
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await asyncio.wait((starting, stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            ready = self._presence.ready_names() if self._presence is not None else set()
            waited = ", ".join(slot.name for slot in self._slots if not ready.issuperset(slot.instances))
            raise StartFailedError(f"not ready after {self._options.ready_timeout_s:.0f} s: {waited or 'the router'}") from None
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
        if self._asked_to_stop.is_set():
            return None
        if self._failed.done():
            raise StartFailedError(self._failed.result())
        return starting.result()

    async def _start(self) -> UpInfo:
        self._logs.mkdir(parents=True, exist_ok=True)
        (self._folder / "tmp").mkdir()
        self._options.tell(f"logs: {self._logs}")
        if (template := self._template) is not None:  # it imports torch while the servers start
            await self._launcher.start(Slot(Template.name, lambda _: template.spec(), self._log(Template.name), is_own=True))
        update: dict[str, object] = {
            "nats_url": self._settings.nats_url or await self._start_server(EmbeddedNats),
            "redis_url": self._settings.redis_url or await self._start_server(EmbeddedValkey),
        }
        if "engine_instances" not in self._settings.model_fields_set:
            update["engine_instances"] = max(self._options.counts.num_engine_instances, self._settings.max_instances)
        self._settings = self._settings.model_copy(update=update)
        self._presence = await Presence.join(self._settings, self._launcher.handle, self._on_ready)
        await self._launcher.use_bus(self._presence.bus)
        async with asyncio.TaskGroup() as tasks:
            for planned in self._slots:
                tasks.create_task(self._launcher.start(self._slot(planned)))
        return self._info(await self._until_ready(self._presence), self._presence)

    async def _start_server(self, kind: type[EmbeddedServer]) -> str:
        folder = self._folder / kind.name
        folder.mkdir()
        server = kind(folder)
        child = await self._launcher.start(Slot(kind.name, lambda _: server.spec(), self._log(kind.name), is_own=True))
        await server.wait_ready(child.pid)
        return server.url

    def _slot(self, planned: PlannedSlot) -> Slot:
        def make_spec(instance_id: InstanceId) -> ChildSpec:
            port = self._router_port if planned.name == MAIN_ROUTER else None
            return serve_spec(planned, self._settings, port, instance_id, self._folder / "tmp")

        is_own, is_fleet = planned.stage == "scaler", planned.name == EMULATED
        return Slot(planned.name, make_spec, self._log(planned.name), is_own, planned.instances, takes_more=is_fleet)

    def _log(self, name: str) -> ChildLog:
        is_chosen = "log_level" in self._settings.model_fields_set
        level = self._settings.log_level.upper() if is_chosen else "WARNING"
        return ChildLog(name, self._logs / f"{name}.log", logging.getLevelNamesMapping()[level], self._options.tell)

    def _on_exit(self, slot: Slot, status: int) -> None:
        """A process ended by itself: fatal before everything was ready, a loss to repair after."""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        is_tried_again = slot.name in (EmbeddedValkey.name, Template.name) and len(slot.crashes_s) + 1 < NUM_TRIES
        if not self._is_ready and not is_tried_again and not self._failed.done():
            self._failed.set_result(_why(slot, how))
        elif status != 0:
            self._options.tell(f"{slot.name} ended with {how}")

    def _on_ready(self, beat: Heartbeat) -> None:
        if beat.name == MAIN_ROUTER and self._presence is not None:
            self._router_port = self._presence.port_of(MAIN_ROUTER) or 0  # a router started again keeps its address
        if sys.stderr.isatty():
            self._options.tell(f"{time.monotonic() - self._begin_s:6.1f} s  {beat.name} is ready")

    async def _until_ready(self, presence: Presence) -> str:
        """The router's URL, once it says that all stages are there."""
        expected = {name for slot in self._slots for name in slot.instances}
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while True:
                url = presence.url_of(MAIN_ROUTER)
                if url is not None and expected <= presence.ready_names():
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"{url}/ready")).status_code == 200:
                            return url
                await asyncio.sleep(READY_POLL_S)

    def _info(self, url: str, presence: Presence) -> UpInfo:
        self._is_ready = True
        pids = self._launcher.pids()
        model = presence.model()
        return UpInfo(
            url=url,
            ready_s=round(time.monotonic() - self._begin_s, 3),
            pss_bytes=sum(pss_bytes(pid) for pid in (os.getpid(), *pids.values())),
            pids=pids,
            nats_url=self._settings.nats_url,
            redis_url=self._settings.redis_url,
            model=model.name if model is not None else self._settings.model_name,
            random_weights=model is not None and model.random_weights,
            emulation=None if model is None else model.emulation,
        )

    def _tell_ready(self, info: UpInfo) -> None:
        if self._options.starter_pid is not None:
            sys.stdout.write(msgspec.json.encode(info).decode() + "\n")
            sys.stdout.flush()
            return
        note = " (random weights: the answers are noise)" if info.random_weights else ""
        note = f" ({info.emulation}: the answers are noise)" if info.emulation is not None else note
        body = f'{{"model": "{info.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        sys.stdout.write(
            f"\nTriptych serves {info.model}{note}\n"
            f"  {info.url}/v1  ready in {info.ready_s:.1f} s, {info.pss_bytes / 1e6:.0f} MB in {len(info.pids)} processes\n\n"
            f"  curl {info.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
            "Ctrl-C stops everything.\n"
        )
        sys.stdout.flush()

    async def _stop(self) -> None:
        """Routers first, they drain while the stages still work; servers last."""
        bound_s = self._settings.drain_timeout_s + KILL_AFTER_S
        await self._launcher.stop([Template.name], KILL_AFTER_S)  # first: nobody shall wait for a fork any more
        await self._launcher.stop([slot.name for slot in self._slots if slot.stage == "router"], bound_s)
        servers = (EmbeddedValkey.name, EmbeddedNats.name)
        await self._launcher.stop([name for name in self._launcher.names() if name not in servers], bound_s)
        if self._presence is not None:
            await self._presence.leave()
        await self._launcher.stop([*servers], KILL_AFTER_S)
