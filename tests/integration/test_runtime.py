"""The runtime without a model: the service frame as a process, the launcher and the real scaler around dummy services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from support.own_server import OwnNats
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.services.launcher.presence import Presence
from triptych.shared.bus import Bus
from triptych.shared.errors import InstanceLost, TriptychError
from triptych.shared.messages import (
    HEARTBEAT_SUBJECT,
    LOST_SUBJECT,
    Accepted,
    DrainRequest,
    Event,
    Heartbeat,
    InstanceId,
    LaunchRequest,
    Lost,
    StatusReply,
    StatusRequest,
)
from triptych.shared.registry import Registry
from triptych.shared.settings import Settings
from triptych.shared.tied_exec import tied

DUMMY = Path(__file__).parents[1] / "support" / "dummy_service.py"
TIMEOUT_S = 60.0  # chosen: generous, a loaded machine takes seconds to start Python
FAST = {"TRIPTYCH_HEARTBEAT_INTERVAL_S": "0.1", "TRIPTYCH_HEARTBEAT_TIMEOUT_S": "2.0"}


class Ears:
    """Hears everybody on the bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.registry = Registry(5.0)
        self.beats: list[Heartbeat] = []
        self.lost: list[Lost] = []

    @classmethod
    async def open(cls, url: str) -> Ears:
        ears = cls(await Bus.connect(url, "ears"))
        for subject in (HEARTBEAT_SUBJECT, LOST_SUBJECT):
            await ears.bus.listen(subject, ears._on_event)
        return ears

    def _on_event(self, event: Event) -> None:
        self.registry.on_event(event, time.monotonic())
        if isinstance(event, Heartbeat):
            self.beats.append(event)
        elif isinstance(event, Lost):
            self.lost.append(event)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not holds():  # noqa: ASYNC110 - looks at several things at once
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}; lost: {self.lost}; last: {self.beats[-5:]}") from None

    async def ready(self, name: str, after: InstanceId | None = None) -> Heartbeat:
        """The ready instance in slot `name`, another one than `after`."""

        def found() -> list[Heartbeat]:
            return [beat for beat in self.registry.ready() if beat.name == name and beat.instance_id != after]

        await self.until(lambda: bool(found()), f"{name} to be ready")
        return found()[0]


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[OwnNats]:
    server = await OwnNats.start(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def ears(own_nats: OwnNats) -> AsyncIterator[Ears]:
    ears = await Ears.open(own_nats.url)
    yield ears
    await ears.bus.close()


@pytest.fixture
def environment(own_nats: OwnNats) -> dict[str, str]:
    return {**os.environ, **FAST, "TRIPTYCH_NATS_URL": own_nats.url}


Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start(environment: dict[str, str]) -> AsyncIterator[Start]:
    processes: list[asyncio.subprocess.Process] = []

    async def start(service: str, name: str, **env: str) -> asyncio.subprocess.Process:
        command = tied(sys.executable, str(DUMMY), service, name)
        pipe = asyncio.subprocess.PIPE
        processes.append(await asyncio.create_subprocess_exec(*command, env={**environment, **env}, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def end_of(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_service_serves_and_tells_of_itself(ears: Ears, start: Start) -> None:
    process = await start("instance", "dummy-0")
    beat = await ears.ready("dummy-0")
    assert beat.resources.pid == process.pid
    assert beat.roles == ("encoder",)
    assert beat.http_url.startswith("http://127.0.0.1:")
    await ears.until(lambda: ears.beats[-1].resources.pss_bytes > 1_000_000, "its memory")
    async with httpx.AsyncClient(base_url=beat.http_url, trust_env=False) as http:
        for path in ("/live", "/ready"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/health")).json() == {"status": "ready", "instance_id": beat.instance_id}
        metrics = (await http.get("/metrics")).text
    assert "triptych_ready 1.0" in metrics
    assert 'triptych_stage_running{stage="dummy"} 0.0' in metrics
    assert "triptych_bus_slow_consumer_drops_total 0.0" in metrics
    assert "process_resident_memory_bytes" in metrics


async def test_sigterm_drains_then_exits_0(ears: Ears, start: Start) -> None:
    process = await start("instance", "dummy-0")
    beat = await ears.ready("dummy-0")
    work_s = 1.0
    await ears.bus.request(beat.instance_id, LaunchRequest(str(work_s)), TIMEOUT_S)
    begin_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    await ears.until(lambda: ears.beats[-1].state == "draining", "the news that it drains")
    async with httpx.AsyncClient(base_url=beat.http_url, trust_env=False) as http:
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/live")).status_code == 200
    assert await ears.bus.request(beat.instance_id, LaunchRequest("0.5"), TIMEOUT_S) == Accepted(), "it still answers"
    status, out, err = await end_of(process)
    assert status == 0, err
    assert time.monotonic() - begin_s >= 0.3, "it waited for its work"
    assert out.splitlines() == ["starting", "stopped"]
    await ears.until(lambda: bool(ears.lost), "its last word")
    assert ears.lost == [Lost(beat.instance_id, "dummy-0", 0, expected=False)], "nobody asked the cluster for that"
    assert "Traceback" not in err


async def test_a_drain_ends_at_its_bound_and_a_second_signal_ends_it_at_once(ears: Ears, start: Start) -> None:
    for env, num_signals in (({"TRIPTYCH_DRAIN_TIMEOUT_S": "0.3"}, 1), ({}, 2)):
        process = await start("instance", "dummy-0", **env)
        beat = await ears.ready("dummy-0")
        await ears.bus.request(beat.instance_id, LaunchRequest("1000"), TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        await ears.until(lambda: ears.beats[-1].state == "draining", "the news that it drains")
        for _ in range(num_signals - 1):
            process.send_signal(signal.SIGTERM)
        status, _, err = await end_of(process)
        assert status == (0 if num_signals == 1 else 1)
        assert ("drain timeout" in err) is (num_signals == 1)
        ears.registry.on_event(Lost(beat.instance_id, "dummy-0", status, expected=True), time.monotonic())


async def test_a_drain_request_without_exit_stays(ears: Ears, start: Start) -> None:
    process = await start("instance", "dummy-0")
    beat = await ears.ready("dummy-0")
    assert await ears.bus.request(beat.instance_id, DrainRequest(exit=False), TIMEOUT_S) == Accepted()
    await ears.until(lambda: ears.beats[-1].state == "draining", "the news that it drains")
    assert await ears.bus.request(beat.instance_id, LaunchRequest("0"), TIMEOUT_S) == Accepted()
    assert process.returncode is None
    assert await ears.bus.request(beat.instance_id, DrainRequest(exit=True), TIMEOUT_S) == Accepted()
    assert (await end_of(process))[0] == 0


async def test_one_that_gives_up_says_so_and_ends_as_if_it_had_crashed(ears: Ears, start: Start) -> None:
    """So that it is left out at once, and started again."""
    process = await start("instance", "dummy-0")
    beat = await ears.ready("dummy-0")
    assert await ears.bus.request(beat.instance_id, LaunchRequest("-1"), TIMEOUT_S) == Accepted()
    status, _, err = await end_of(process)
    assert status == 1, err
    await ears.until(lambda: bool(ears.lost), "its last word")
    assert ears.beats[-1].state == "failing"
    assert ears.lost == [Lost(beat.instance_id, "dummy-0", 1, expected=False)]


async def test_a_failing_start_is_one_clear_line_and_status_1(ears: Ears, start: Start) -> None:
    status, _, err = await end_of(await start("instance", "broken"))
    assert status == 1
    assert "could not start: this one never starts" in err
    assert "Traceback" not in err
    await ears.until(lambda: bool(ears.lost), "its last word")
    assert (ears.lost[0].exit_code, ears.lost[0].expected) == (1, False)


async def test_one_that_is_stopped_while_it_starts_leaves_quietly(ears: Ears, start: Start) -> None:
    process = await start("instance", "slow")
    await ears.until(lambda: any(beat.name == "slow" for beat in ears.beats), "its first heartbeat")
    process.send_signal(signal.SIGTERM)
    status, out, err = await end_of(process)
    assert (status, out) == (0, "stopped\n"), err
    assert "Traceback" not in err
    await ears.until(lambda: bool(ears.lost), "its last word")


async def test_all_interfaces_are_refused(start: Start) -> None:
    every = ".".join("0000")
    status, _, err = await end_of(await start("instance", "dummy-0", TRIPTYCH_BIND_HOST=every))
    assert status == 1
    assert "bind_host must be one address" in err


async def test_a_killed_router_is_lost_for_the_stages(ears: Ears, start: Start) -> None:
    stage = await start("instance", "dummy-0")
    await ears.ready("dummy-0")  # first, or it may never hear of the router: then it has nothing of it to free
    router = await start("router", "router-0", TRIPTYCH_PORT="0")
    beat = await ears.ready("router-0")
    router.kill()
    assert stage.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        while (line := (await stage.stdout.readline()).decode()) and not line.startswith("router lost"):
            pass
    assert line.strip() == f"router lost {beat.instance_id}"


async def test_a_service_outlives_the_nats_server(ears: Ears, own_nats: OwnNats, start: Start) -> None:
    process = await start("instance", "dummy-0")
    beat = await ears.ready("dummy-0")
    own_nats.stop()
    await ears.until(lambda: not ears.bus.is_connected, "the loss of the server")
    await own_nats.start_again()
    num_beats = len(ears.beats)
    await ears.until(lambda: len(ears.beats) > num_beats, "heartbeats")
    assert ears.beats[-1].instance_id == beat.instance_id
    assert await ears.bus.request(beat.instance_id, LaunchRequest("0"), TIMEOUT_S) == Accepted()
    assert process.returncode is None


class LocalCluster:
    """The real launcher with dummy stages and the real scaler."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self.launcher = LocalLauncher(lambda slot, status: None)
        self.presence: Presence | None = None

    def slot(self, name: str, command: Callable[[InstanceId], tuple[str, ...]], is_own: bool = False) -> Slot:
        log = ChildLog(name, self._folder / f"{name}.log", 0, lambda line: None)
        return Slot(name, lambda instance_id: ChildSpec(name, command(instance_id), self._environment), log, is_own)

    async def start(self, nats_url: str) -> None:
        settings = Settings(nats_url=nats_url, heartbeat_interval_s=0.1)
        self.presence = await Presence.join(settings, self.launcher.handle, lambda beat: None)
        await self.launcher.use_bus(self.presence.bus)
        dummy = self.slot("dummy-0", lambda instance_id: (sys.executable, str(DUMMY), "instance", "dummy-0", instance_id))
        serve = (sys.executable, "-m", "triptych.services.cli", "serve", "scaler", "--name", "scaler-0", "--instance-id")
        await self.launcher.start(dummy)
        await self.launcher.start(self.slot("scaler-0", lambda instance_id: (*serve, instance_id), is_own=True))

    async def stop(self) -> None:
        await self.launcher.stop(["dummy-0", "scaler-0"], 10)
        if self.presence is not None:
            await self.presence.leave()


@pytest.fixture
async def local(environment: dict[str, str], own_nats: OwnNats, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(environment, tmp_path)
    try:
        await cluster.start(own_nats.url)
        yield cluster
    finally:
        await cluster.stop()


async def status_of(ears: Ears, scaler: Heartbeat) -> StatusReply:
    reply = await ears.bus.request(scaler.instance_id, StatusRequest(), TIMEOUT_S)
    assert isinstance(reply, StatusReply)
    return reply


async def test_the_scaler_has_a_killed_process_started_again(ears: Ears, local: LocalCluster) -> None:
    scaler = await ears.ready("scaler-0")
    first = await ears.ready("dummy-0")
    os.kill(first.resources.pid, signal.SIGKILL)
    second = await ears.ready("dummy-0", after=first.instance_id)
    assert Lost(first.instance_id, "dummy-0", -signal.SIGKILL, expected=False) in ears.lost
    status = await status_of(ears, scaler)
    assert status.num_restarts == 1
    assert {beat.instance_id for beat in status.instances} == {scaler.instance_id, second.instance_id}
    with pytest.raises(InstanceLost):
        await ears.bus.request(first.instance_id, LaunchRequest("0"), TIMEOUT_S)


async def test_a_process_that_somebody_terminates_is_started_again(ears: Ears, local: LocalCluster) -> None:
    """It ends cleanly, with status 0, but nobody asked the cluster to do without it."""
    await ears.ready("scaler-0")
    first = await ears.ready("dummy-0")
    os.kill(first.resources.pid, signal.SIGTERM)
    await ears.ready("dummy-0", after=first.instance_id)
    assert Lost(first.instance_id, "dummy-0", 0, expected=False) in ears.lost


async def test_a_drained_process_is_not_started_again_until_asked(ears: Ears, local: LocalCluster) -> None:
    scaler = await ears.ready("scaler-0")
    first = await ears.ready("dummy-0")
    await ears.bus.request(first.instance_id, DrainRequest(), TIMEOUT_S)
    await ears.until(lambda: any(lost.instance_id == first.instance_id for lost in ears.lost), "its end")
    await ears.until(lambda: "dummy-0" not in local.launcher.pids(), "the end of its process")
    assert (await status_of(ears, scaler)).num_restarts == 0
    launcher = next(beat for beat in ears.registry.all() if beat.service == "launcher")
    assert await ears.bus.request(launcher.instance_id, LaunchRequest("dummy-0"), TIMEOUT_S) == Accepted()
    assert (await ears.ready("dummy-0", after=first.instance_id)).instance_id != first.instance_id
    for name in ("dummy-0", "nonsense"):  # it runs; there is none
        with pytest.raises(TriptychError):
            await ears.bus.request(launcher.instance_id, LaunchRequest(name), TIMEOUT_S)


async def test_a_loss_that_nobody_heard_is_repaired_later(ears: Ears, local: LocalCluster) -> None:
    """Stage and scaler die together: the new scaler learns of the loss because the launcher tells it again."""
    scaler = await ears.ready("scaler-0")
    first = await ears.ready("dummy-0")
    for beat in (scaler, first):
        os.kill(beat.resources.pid, signal.SIGKILL)
    await ears.ready("scaler-0", after=scaler.instance_id)
    await ears.ready("dummy-0", after=first.instance_id)


def _is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture
def orphan_maker(tmp_path: Path) -> Path:
    """A launcher's program: starts one child (sleep), prints its pid, waits."""
    script = tmp_path / "launch.py"
    script.write_text(
        "import asyncio, os, pathlib, sys\n"
        "from triptych.services.launcher.child import Child, ChildSpec\n"
        "from triptych.services.launcher.child_log import ChildLog\n"
        "async def main():\n"
        "    log = ChildLog('x', pathlib.Path(sys.argv[1]), 0, print)\n"
        "    child = await Child.start(ChildSpec('x', (sys.argv[2], '-c', 'import time; time.sleep(600)'), os.environ), log)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    return script


async def test_children_die_with_a_killed_launcher(orphan_maker: Path, tmp_path: Path) -> None:
    command = (sys.executable, str(orphan_maker), str(tmp_path / "log"), sys.executable)
    launcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    pid = int(await asyncio.wait_for(launcher.stdout.readline(), TIMEOUT_S))
    assert _is_there(pid)
    launcher.kill()
    await launcher.wait()
    async with asyncio.timeout(TIMEOUT_S):
        while _is_there(pid):  # noqa: ASYNC110 - not our child: nobody tells us
            await asyncio.sleep(0.02)
