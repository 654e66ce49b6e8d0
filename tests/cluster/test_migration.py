"""Roles that change, requests that move and instances that die under that, while clients ask: they notice nothing of it, and
nothing is held in the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest

from support.cases import Case, random_case
from support.client import ask, session
from support.cluster import Cluster
from support.reference import Reference
from support.watch import Watch
from triptych.shared.bus import Bus
from triptych.shared.messages import Accepted, HandOverRequest, Heartbeat, InstanceId, Role, SwitchReply, SwitchRequest

NUM_CLIENTS = 6
NUM_CHANGES = 200
NUM_KILLS = 12
MEND_TIMEOUT_S = 60.0
CHANGE_TIMEOUT_S = 30.0
PAUSE_S = 0.05  # at most between two changes; requests take longer
STAGES: tuple[Role, ...] = ("encoder", "prefill", "decode")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def elastic_cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Five engine processes; small steps, so that requests last."""
    counts = ("--encoder", "1", "--prefill", "1", "--decode", "3")
    return start_cluster(*counts, "--stream-interval-s", "0", "--max-attempts", "5")


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    made = [dataclasses.replace(random_case(5000 + i, num_pictures=i % 3), max_tokens=40 + 30 * (i % 4)) for i in range(12)]
    for case in made:
        reference.answer(case)
    return made


@dataclass
class Load:
    """Clients that ask until told to stop, none of which may see an error. num_decodes: instances that each request was at."""

    url: str
    cases: list[Case]
    reference: Reference
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    num_decodes: list[int] = field(default_factory=list)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        index = number
        while not self.is_over.is_set():
            case = self.cases[index % len(self.cases)]
            salt = str(index // len(self.cases) // 2)
            answer = await ask(http, self.url, case, stream=index % 3 > 0, cache_salt=salt)
            assert answer.error is None, answer
            verdict = self.reference.judge(case, answer)
            assert not verdict.startswith("wrong"), verdict
            assert answer.trace is not None
            self.num_decodes.append(sum(stage["stage"] == "decode" for stage in answer.trace["stages"]))
            index += NUM_CLIENTS

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the block, and until each client has had another answer."""
        async with session() as http, asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self.client(http, number))
            yield
            await self.more(NUM_CLIENTS)
            self.is_over.set()

    async def more(self, count: int) -> None:
        num_before = len(self.num_decodes)
        async with asyncio.timeout(120):
            while len(self.num_decodes) < num_before + count:  # noqa: ASYNC110 - a count
                await asyncio.sleep(0.05)


class Changes:
    """Random switches and hand-overs that leave each stage an instance."""

    def __init__(self, bus: Bus, roles: dict[InstanceId, tuple[Role, ...]]) -> None:
        self.bus = bus
        self.roles = roles
        self.rng = random.Random(7)
        self.switch_s: list[float] = []
        self.num_hand_overs = 0

    async def one(self) -> None:
        instance_id = self.rng.choice(sorted(self.roles))
        if self.rng.random() < 0.5 and "decode" in self.roles[instance_id]:
            some = self.rng.choice((None, 1, 200))
            assert isinstance(await self.bus.request(instance_id, HandOverRequest(some), CHANGE_TIMEOUT_S), Accepted)
            self.num_hand_overs += 1
            return
        others = {role for other, roles in self.roles.items() if other != instance_id for role in roles}
        wanted = [role for role in STAGES if role not in others or self.rng.random() < 0.5]
        reply = await self.bus.request(instance_id, SwitchRequest(tuple(wanted)), CHANGE_TIMEOUT_S)
        assert isinstance(reply, SwitchReply)
        self.roles[instance_id] = tuple(wanted)
        self.switch_s.append(reply.seconds)


async def test_random_changes_under_load(elastic_cluster: Cluster, cases: list[Case], reference: Reference) -> None:
    load = Load(elastic_cluster.url, cases, reference)
    async with Watch(elastic_cluster.nats_url) as watch:
        await watch.until_complete()
        beats = {beat.instance_id: beat.roles for beat in watch.living().values() if beat.service == "instance"}
        bus = await Bus.connect(elastic_cluster.nats_url, "test")
        changes = Changes(bus, beats)
        try:
            async with load.running():
                for _ in range(NUM_CHANGES):
                    await changes.one()
                    await asyncio.sleep(changes.rng.uniform(0, PAUSE_S))
            for instance_id in changes.roles:
                await bus.request(instance_id, SwitchRequest(STAGES), CHANGE_TIMEOUT_S)
        finally:
            await bus.close()
        await watch.until_at_rest(10, "after all changes")
    assert max(load.num_decodes) > 1, "no request ever moved"
    print(
        f"{len(load.num_decodes)} answers; {len(changes.switch_s)} switches, slowest {1000 * max(changes.switch_s):.0f} ms; "
        f"{changes.num_hand_overs} hand-overs asked for; decodes of a request: {sorted(load.num_decodes)[-10:]}"
    )


async def test_instances_die_while_requests_move(
    start_cluster: Callable[..., Cluster], cases: list[Case], reference: Reference
) -> None:
    """Where they were, or where they go."""
    cluster = start_cluster("--decode", "3", "--stream-interval-s", "0", "--max-attempts", "5")
    load, rng = Load(cluster.url, cases, reference), random.Random(11)
    async with Watch(cluster.nats_url) as watch:
        bus = await Bus.connect(cluster.nats_url, "test")
        try:
            async with load.running():
                for _ in range(NUM_KILLS):
                    await watch.until(lambda beats: len(decoding(beats)) == 3, MEND_TIMEOUT_S, "three that decode")
                    await load.more(2)
                    source, victim = rng.choice(decoding(watch.living())), rng.choice(decoding(watch.living()))
                    await bus.request(source.instance_id, HandOverRequest(), CHANGE_TIMEOUT_S)
                    await asyncio.sleep(rng.uniform(0, PAUSE_S))
                    os.kill(victim.resources.pid, signal.SIGKILL)
                    await watch.until(lambda beats, gone=victim: gone.instance_id not in beats, MEND_TIMEOUT_S, "it is gone")  # type: ignore[misc]
        finally:
            await bus.close()
        await watch.until(lambda beats: len(decoding(beats)) == 3, MEND_TIMEOUT_S, "three that decode")
        await watch.until_at_rest(10, "after all kills")
    print(f"{len(load.num_decodes)} answers; decodes of a request: {sorted(load.num_decodes)[-10:]}")


def decoding(beats: dict[str, Heartbeat]) -> list[Heartbeat]:
    """Those that are ready to."""
    return sorted(
        (beat for beat in beats.values() if beat.state == "ready" and "decode" in beat.roles), key=lambda beat: beat.instance_id
    )
