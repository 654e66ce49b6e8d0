"""Two hundred switches and hand-overs, at random, while requests run: each output is that of an undisturbed run, and nothing is
held in the end. Instances with fake engines, whose tokens tell of any mistake in KV; what a router does is done by hand.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from support.fake_cluster import FakeCluster, Stream, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.shared.errors import Overloaded
from triptych.shared.messages import Role

NUM_CHANGES, NUM_CLIENTS = 200, 5
NAMES = ("i0", "i1", "i2", "i3")
TEXT_ROLES: tuple[Role, ...] = ("prefill", "decode")
T = TypeVar("T")


class Client:
    """Asks one request after the other, wherever an instance takes it."""

    def __init__(self, cluster: FakeCluster, number: int) -> None:
        self.cluster, self.number, self.rng = cluster, number, random.Random(number)
        self.num_answers = self.num_moves = 0

    async def ask(self) -> None:
        prompt = [self.number, self.num_answers % 5, *range(self.rng.randint(1, 12))]
        request = text_request(f"client{self.number}-{self.num_answers}", prompt, self.rng.randint(2, 40), timeout_s=60.0)
        id_ = request.request_id
        reply, _ = await self._anywhere(lambda name: self.cluster.prefill(name, request))
        if reply.kv is not None:
            _, source = await self._anywhere(lambda name: self.cluster.decode(name, request, reply, timeout_s=60.0))
            num_moves = 0
            while (stream := await self._ended_there(id_, num_moves)).kv is not None:
                num_moves += 1
                self.num_moves += 1
                _, source = await self._anywhere(lambda name: self.cluster.go_on(name, request, reply), source)
            assert stream.error_code is None, stream.last
            output = [reply.first_token, *stream.token_ids]
            assert output == expected_tokens(prompt, 0, request.sampling.max_tokens)
        await self.cluster.release(id_)
        self.num_answers += 1

    async def _ended_there(self, request_id: str, num_moves: int) -> Stream:
        def is_over() -> bool:
            stream = self.cluster.stream(request_id)
            return stream.num_moves > num_moves or stream.last is not None

        await until(is_over, request_id)
        return self.cluster.stream(request_id)

    async def _anywhere(self, ask: Callable[[str], Awaitable[T]], source: str = "") -> tuple[T, str]:
        """At an instance that does not refuse; at `source` last."""
        while True:
            for name in sorted(NAMES, key=lambda name: (name == source, self.rng.random())):
                try:
                    return await ask(name), name
                except Overloaded:  # it has not that role now
                    continue
            await asyncio.sleep(0.001)


async def test_nobody_notices() -> None:
    cluster, rng = FakeCluster(), random.Random(1)
    roles: dict[str, set[Role]] = {name: set(TEXT_ROLES) for name in NAMES}
    for name in NAMES:
        engine = FakeEngine(200)
        engine.step_time_s = 0.0005
        await cluster.start(name, TEXT_ROLES, engine)
    clients, is_over = [Client(cluster, number) for number in range(NUM_CLIENTS)], asyncio.Event()

    async def work(client: Client) -> None:
        while not is_over.is_set():
            await client.ask()

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))
        for _ in range(NUM_CHANGES):
            name = rng.choice(NAMES)
            if "decode" in roles[name] and rng.random() < 0.5:
                await cluster.hand_over(name, rng.choice((None, 1, 40)))
            else:
                others = set[Role]().union(*(roles[other] for other in NAMES if other != name))
                roles[name] = {role for role in TEXT_ROLES if role not in others or rng.random() < 0.5}
                await cluster.switch(name, *roles[name], timeout_s=60.0)
            await asyncio.sleep(rng.uniform(0, 0.01))
        is_over.set()
    assert sum(client.num_moves for client in clients) > 10
    for host in cluster.hosts.values():
        await until(lambda roles=host._roles: len(roles.all()) == len(roles.names), "roles end")  # type: ignore[misc]
    await cluster.stop()
