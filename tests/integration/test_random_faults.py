"""Instances that switch, hand over, give up and die, at random, under a router's requests, some of whose clients leave: each
output is that of an undisturbed run, and nothing is held in the end. Fake engines, whose tokens tell of any mistake in KV.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from support.fake_cluster import ROUTER, FakeBus, FakeCluster, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.cache.index import MemoryIndex
from triptych.services.router.app import RouterService
from triptych.services.router.job import Job, Parts
from triptych.services.router.prompt import Prompt
from triptych.services.router.record import RequestRecord
from triptych.services.router.retry import run_request
from triptych.shared.bus import Bus
from triptych.shared.errors import TriptychError
from triptych.shared.instance_info import ModelCard
from triptych.shared.messages import Event, InstanceId, Lost, Role, TokenBatch
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.service import ServiceContext

NUM_DEATHS, NUM_CHANGES_BETWEEN, NUM_ANSWERS_BETWEEN = 8, 10, 5  # so many at least: a request outlives its instances
NUM_CLIENTS, NUM_INSTANCES = 6, 4
BEAT_S = 0.005
TIMEOUT_S = 60.0
TEXT_ROLES: tuple[Role, ...] = ("prefill", "decode")


class RoutedBus(FakeBus):
    """Events go to whoever listens, but for those of the dead."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: dict[str, list[Callable[[Event], None]]] = defaultdict(list)

    async def listen(self, subject: str, handler: Callable[[Event], None]) -> None:
        self.listeners[subject].append(handler)

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """It is never away."""

    async def publish_event(self, subject: str, event: Event) -> None:
        if not isinstance(event, TokenBatch) or event.instance_id in self.hosts:
            for listener in self.listeners[subject]:
                listener(event)


class World:
    """A router before some instances that do text."""

    def __init__(self, checkpoint: Path) -> None:
        self.cluster = FakeCluster(model=str(checkpoint), block_size=4, max_attempts=5, stream_interval_s=0)
        self.bus = self.cluster.bus = RoutedBus()
        self.router = RouterService(self.cluster.settings, MemoryIndex())
        self.roles: dict[str, set[Role]] = {}
        self.ending: list[asyncio.Task[None]] = []
        self.num_started = 0

    async def start(self) -> Parts:
        bus, registry = cast(Bus, self.bus), self.cluster.registry
        await self.router.start(ServiceContext(self.cluster.settings, ROUTER, "router-0", bus, registry, "", "127.0.0.1"))
        for _ in range(NUM_INSTANCES):
            await self.add()
        return self.parts

    @property
    def parts(self) -> Parts:
        assert self.router._running is not None
        return self.router._running.parts

    async def add(self) -> None:
        assert self.router._running is not None
        engine = FakeEngine(200)
        engine.step_time_s = 0.0005
        engine.model_card = ModelCard("fake", self.router._running.checkpoint.revision, 10_000)
        self.num_started += 1
        await self.cluster.start(f"i{self.num_started}", TEXT_ROLES, engine)
        self.roles[f"i{self.num_started}"] = set(TEXT_ROLES)

    def kill(self, rng: random.Random) -> None:
        """Its memory is freed, too, as at the end of a process, but nobody hears of it any more."""
        name = rng.choice(sorted(self.roles))
        del self.bus.hosts[InstanceId(name)], self.roles[name]
        host = self.cluster.hosts.pop(InstanceId(name))
        self.cluster.registry.on_event(Lost(InstanceId(name), name, 9, expected=False), time.monotonic())
        self.ending.append(asyncio.create_task(host.stop()))

    async def beat_forever(self) -> None:
        while True:
            for instance_id in list(self.cluster.hosts):
                self.cluster.beat(instance_id)
            await asyncio.sleep(BEAT_S)

    async def change(self, rng: random.Random) -> None:
        """Each stage keeps an instance."""
        name = rng.choice(sorted(self.roles))
        others = set[Role]().union(*(roles for other, roles in self.roles.items() if other != name))
        if "decode" in self.roles[name] and rng.random() < 0.5:
            await self.cluster.hand_over(name, rng.choice((None, 1, 40)))
        else:
            self.roles[name] = {role for role in TEXT_ROLES if role not in others or rng.random() < 0.5}
            await self.cluster.switch(name, *self.roles[name], timeout_s=rng.choice((0.01, TIMEOUT_S)))

    async def stop(self) -> None:
        await asyncio.gather(*self.ending)
        await self.cluster.stop()
        await self.router.stop()


@dataclass
class Client:
    """Asks one request after the other."""

    parts: Parts
    number: int
    num_answers: int = 0
    num_failures: int = 0
    num_attempts: int = 0

    async def ask(self, rng: random.Random) -> None:
        prompt = [self.number, self.num_answers % 5, *range(rng.randint(1, 12))]
        count, leaves_after = rng.randint(2, 60), rng.choice((0, 0, 0, 20))
        now_s = time.monotonic()
        record = RequestRecord(f"client{self.number}-{self.num_answers}", now_s, now_s + TIMEOUT_S)
        job = Job(Prompt(array("I", prompt), ()), [], SamplingParams(count), is_streaming=rng.random() < 0.5)
        output: list[int] = []
        reason: Any = None
        failure: TriptychError | None = None
        try:
            async with aclosing(run_request(self.parts, job, record)) as pieces:
                async for piece in pieces:
                    output += piece.token_ids
                    reason = piece.finish_reason
                    if leaves_after and len(output) > leaves_after:
                        break
        except TriptychError as error:
            failure = error
            self.num_failures += 1
        if failure is not None:  # instances ended under it each time
            assert len(record.attempts) >= self.parts.limits.max_attempts, failure
        elif not leaves_after:
            assert (reason, len(output)) == ("length", count)
        assert output == expected_tokens(prompt, 0, len(output))
        self.num_attempts += len(record.attempts)
        self.num_answers += 1


async def test_nobody_notices(toy_checkpoint: Path) -> None:
    world, rng = World(toy_checkpoint), random.Random(3)
    parts = await world.start()
    clients, is_over = [Client(parts, number) for number in range(NUM_CLIENTS)], asyncio.Event()

    def num_answers() -> int:
        return sum(client.num_answers for client in clients)

    async def work(client: Client) -> None:
        own = random.Random(client.number)
        while not is_over.is_set():
            await client.ask(own)

    beating = asyncio.create_task(world.beat_forever())
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))
        for _ in range(NUM_DEATHS):
            num_before, num_changes = num_answers(), 0
            while num_changes < NUM_CHANGES_BETWEEN or num_answers() < num_before + NUM_ANSWERS_BETWEEN:
                await world.change(rng)
                num_changes += 1
                await asyncio.sleep(rng.uniform(0, 0.02))
            world.kill(rng)
            await world.add()
        is_over.set()
    num_failures = sum(client.num_failures for client in clients)
    print(f"{num_answers()} answers in {sum(client.num_attempts for client in clients)} attempts, {num_failures} failures")
    assert num_failures <= num_answers() // 20
    await until(lambda: not (len(parts.streams) or len(parts.dispatcher) or len(parts.book)), "the router is at rest")
    for host in world.cluster.hosts.values():
        await until(lambda roles=host._roles: len(roles.all()) == len(roles.names), "roles end")  # type: ignore[misc]
    beating.cancel()
    await world.stop()
