"""Roles that change and requests that move while clients ask: they notice nothing of it, and nothing is held in the end."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import pytest

from support.cases import random_case
from support.client import ask, session
from support.cluster import Cluster
from support.reference import Reference
from support.watch import Watch
from triptych.shared.bus import Bus
from triptych.shared.messages import Accepted, HandOverRequest, InstanceId, Role, SwitchReply, SwitchRequest

NUM_CLIENTS = 6
NUM_CHANGES = 200
CHANGE_TIMEOUT_S = 30.0
PAUSE_S = 0.05  # at most between two changes; requests take longer
STAGES: tuple[Role, ...] = ("encoder", "prefill", "decode")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def elastic_cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Five engine processes; small steps, so that requests last."""
    return start_cluster("--encoder", "1", "--prefill", "1", "--decode", "3", "--stream-interval-s", "0")


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


async def test_random_changes_under_load(elastic_cluster: Cluster, reference: Reference) -> None:
    cases = [dataclasses.replace(random_case(5000 + i, num_pictures=i % 3), max_tokens=40 + 30 * (i % 4)) for i in range(12)]
    for case in cases:
        reference.answer(case)
    cluster, is_over, num_answers = elastic_cluster, asyncio.Event(), 0
    num_decodes: list[int] = []

    async def client(number: int) -> None:
        nonlocal num_answers
        index = number
        while not is_over.is_set():
            case = cases[index % len(cases)]
            answer = await ask(http, cluster.url, case, stream=index % 3 > 0, cache_salt=str(index // len(cases) // 2))
            assert answer.error is None, answer
            verdict = reference.judge(case, answer)
            assert not verdict.startswith("wrong"), verdict
            assert answer.trace is not None
            num_decodes.append(sum(stage["stage"] == "decode" for stage in answer.trace["stages"]))
            num_answers += 1
            index += NUM_CLIENTS

    async with Watch(cluster.nats_url) as watch, session() as http:
        await watch.until_complete()
        beats = {beat.instance_id: beat.roles for beat in watch.living().values() if beat.service == "instance"}
        bus = await Bus.connect(cluster.nats_url, "test")
        changes = Changes(bus, beats)
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_CLIENTS):
                    group.create_task(client(number))
                for _ in range(NUM_CHANGES):
                    await changes.one()
                    await asyncio.sleep(changes.rng.uniform(0, PAUSE_S))
                num_before = num_answers
                async with asyncio.timeout(120):
                    while num_answers < num_before + NUM_CLIENTS:  # noqa: ASYNC110 - a count
                        await asyncio.sleep(0.05)
                is_over.set()
            for instance_id in changes.roles:
                await bus.request(instance_id, SwitchRequest(STAGES), CHANGE_TIMEOUT_S)
        finally:
            await bus.close()
        await watch.until_at_rest(10, "after all changes")
    assert max(num_decodes) > 1, "no request ever moved"
    print(
        f"{num_answers} answers; {len(changes.switch_s)} switches, slowest {1000 * max(changes.switch_s):.0f} ms; "
        f"{changes.num_hand_overs} hand-overs asked for; decodes of a request: {sorted(num_decodes)[-10:]}"
    )
