"""Launchers of the scaler: replicas follow what is wanted, by processes of this machine or by an orchestrator that reads the
metric. Instances are processes without a stage; the orchestrator is a stand-in that does what KEDA with an HPA would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from prometheus_client import CollectorRegistry

from support.own_server import OwnNats
from support.watch import Watch
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.services.launcher.presence import Presence
from triptych.services.scaler.launchers import AdviseOnly, Launcher, LocalLaunches, Scaling, WantedReplicas
from triptych.shared.errors import BadRequest
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.settings import Settings
from triptych.shared.tied_exec import tied

DUMMY = Path(__file__).parents[1] / "support" / "dummy_service.py"
TIMEOUT_S = 60.0  # chosen: generous, a loaded machine takes seconds to start Python
POLL_S = 0.05
TEXT, OTHERS = ("text", "text"), ("encoder", "")


class World(Protocol):
    """A cluster that a launcher works for."""

    launcher: Launcher
    metrics: CollectorRegistry

    async def stop(self) -> None: ...


def environment(nats_url: str, group: str) -> dict[str, str]:
    own = {"TRIPTYCH_NATS_URL": nats_url, "TRIPTYCH_GROUP": group, "TRIPTYCH_HEARTBEAT_INTERVAL_S": "0.1"}
    return {**os.environ, **own}


class LocalWorld:
    """What `triptych up` has, less its stages."""

    def __init__(self, nats_url: str, folder: Path) -> None:
        self._nats_url = nats_url
        self._folder = folder
        self.metrics = CollectorRegistry()

    async def start(self) -> LocalWorld:
        self._local = LocalLauncher(lambda slot, status: None, make_slot=lambda name, _, group: self._slot(name, group))
        settings = Settings(nats_url=self._nats_url, heartbeat_interval_s=0.1)
        self._presence = await Presence.join(settings, self._local.handle, lambda beat: None)
        await self._local.use_bus(self._presence.bus)
        self.launcher = LocalLaunches(self._presence.bus, self._presence.instance_id, WantedReplicas(self.metrics))
        return self

    def _slot(self, name: str, group: str) -> Slot:
        def make_spec(instance_id: InstanceId) -> ChildSpec:
            command = (sys.executable, str(DUMMY), "instance", name, instance_id)
            return ChildSpec(name, command, environment(self._nats_url, group))

        return Slot(name, make_spec, ChildLog(name, self._folder / f"{name}.log", 0, lambda line: None))

    async def stop(self) -> None:
        await self._local.stop(self._local.names(), 10)
        await self._presence.leave()


class OrchestratedWorld:
    """Somebody else reads the metric, starts what lacks, and terminates the youngest of what is too much."""

    def __init__(self, nats_url: str) -> None:
        self._nats_url = nats_url
        self.metrics = CollectorRegistry()
        self.launcher = AdviseOnly(WantedReplicas(self.metrics))
        self._pods: dict[tuple[str, str], list[asyncio.subprocess.Process]] = {TEXT: [], OTHERS: []}
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            for (kind, group), pods in self._pods.items():
                wanted = self.metrics.get_sample_value("triptych_wanted_replicas", {"kind": kind, "group": group})
                while wanted is not None and len(pods) < wanted:
                    name = f"{kind}-{len(pods)}pod"
                    command = tied(sys.executable, str(DUMMY), "instance", name)
                    quiet = asyncio.subprocess.DEVNULL
                    env = environment(self._nats_url, group)
                    pods.append(await asyncio.create_subprocess_exec(*command, env=env, stdout=quiet, stderr=quiet))
                while wanted is not None and len(pods) > wanted:
                    pods.pop().send_signal(signal.SIGTERM)
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        self._following.cancel()
        for pod in (pod for pods in self._pods.values() for pod in pods):
            with contextlib.suppress(ProcessLookupError):
                pod.terminate()
            await asyncio.wait_for(pod.wait(), TIMEOUT_S)


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[OwnNats]:
    server = await OwnNats.start(tmp_path)
    yield server
    server.stop()


@pytest.fixture(params=["local", "advise only"])
async def world(request: pytest.FixtureRequest, own_nats: OwnNats, tmp_path: Path) -> AsyncIterator[World]:
    is_local = request.param == "local"
    made: World = await LocalWorld(own_nats.url, tmp_path).start() if is_local else OrchestratedWorld(own_nats.url)
    yield made
    await made.stop()


def there(beats: Mapping[str, Heartbeat], kind: str, group: str) -> list[InstanceId]:
    """Ready instances of that kind and group."""
    roles = set(ROLES_OF[kind])
    return [
        beat.instance_id
        for beat in beats.values()
        if beat.state == "ready" and beat.service == "instance" and (set(beat.roles), beat.group) == (roles, group)
    ]


async def test_replicas_follow_what_is_wanted(world: World, own_nats: OwnNats) -> None:
    async with Watch(own_nats.url) as watch:
        await world.launcher.scale(Scaling(*TEXT, num_wanted=2, num_more=2))
        await world.launcher.scale(Scaling(*OTHERS, num_wanted=1, num_more=1))
        await watch.until(
            lambda beats: len(there(beats, *TEXT)) == 2 and len(there(beats, *OTHERS)) == 1, TIMEOUT_S, "those wanted"
        )
        leaving = there(watch.living(), *TEXT)[:1]
        await world.launcher.scale(Scaling(*TEXT, num_wanted=1, leaving=tuple(leaving)))
        await watch.until(lambda beats: len(there(beats, *TEXT)) == 1, TIMEOUT_S, "one to leave")
        assert len(there(watch.living(), *OTHERS)) == 1
        await world.launcher.scale(Scaling(*TEXT, num_wanted=2, num_more=1))
        await watch.until(lambda beats: len(there(beats, *TEXT)) == 2, TIMEOUT_S, "another one")
    for (kind, group), count in ((TEXT, 2), (OTHERS, 1)):
        labels = {"kind": kind, "group": group}
        assert world.metrics.get_sample_value("triptych_wanted_replicas", labels) == count


@pytest.mark.parametrize(("kind", "group"), [("router", ""), ("text", "pictures")])
async def test_what_there_cannot_be_is_refused(world: World, kind: str, group: str) -> None:
    with pytest.raises(BadRequest, match="there are no instances of kind"):
        await world.launcher.scale(Scaling(kind, group, num_wanted=1, num_more=1))
    assert world.metrics.get_sample_value("triptych_wanted_replicas", {"kind": kind, "group": group}) is None
