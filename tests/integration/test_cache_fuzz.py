"""Many requests at once over tiny pools, at random: beginnings, pictures and salts that come again, clients that leave, an
index that is wrong, instances of every kind. Each answer is that of its own prompt. In the end nothing is held, what is kept is
what its keys say, and the index knows just that.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from support import cache_clients, fake_cluster
from support.cache_clients import PLACEMENTS, Client, Prompt, Told, info, random_prompt
from support.fake_cluster import FakeCluster
from support.fake_engine import BLOCK_SIZE, FakeEngine
from triptych.services.prefix_cache import PrefixCache
from triptych.shared.errors import CACHE_MISS, TriptychError
from triptych.shared.messages import InstanceId, PrefixSource, TensorRef

NUM_REQUESTS, NUM_ATTEMPTS = 30, 4
PREPROCESS = "pixels"
WAIT_S = 60.0  # chosen: on a busy machine thirty requests take their time
MISLED = {CACHE_MISS, "tensor_gone"}  # what may come of a wrong index
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))]


class WildClient(Client):
    """Its last attempt is an honest one."""

    def __init__(self, cluster: FakeCluster, kind: str, rng: random.Random) -> None:
        super().__init__(cluster, PLACEMENTS[kind], rng)
        self.answered: list[tuple[Prompt, list[int]]] = []
        self.num_left = self.num_misled = 0

    async def run(self, name: str, prompt: Prompt) -> None:
        await asyncio.sleep(self.rng.random() / 10)
        way = self.rng.choice(["plain", "leaving", "misled"])
        for attempt in range(NUM_ATTEMPTS):
            request_id, is_last = f"{name}-{attempt}", attempt == NUM_ATTEMPTS - 1
            prefill = self.choose("prefill")
            is_lie = way == "misled" and not is_last
            told = self.lie(prompt) if is_lie else self.told(prompt, prefill, not is_last and self.rng.random() < 0.5)
            slack_s = self.rng.choice([None, -3.0, 0.0, 0.01, 5.0, 1e9])
            answering = self.attempt(request_id, prompt, prefill, told, self.rng.random() < 0.5, slack_s)
            if way == "leaving" and not is_last:
                await self.leave(request_id, asyncio.create_task(answering))
                continue
            try:
                output = await answering
            except TriptychError as error:
                if is_last or error.code not in MISLED:
                    raise
                self.num_misled += 1
                continue
            finally:
                await self.cluster.release(request_id)
            assert output == prompt.expected()
            self.answered.append((prompt, output))
            return

    async def encode(self, request_id: str, picture: int) -> TensorRef:
        """Of pixels that another process has, as preprocess does."""
        pixels = await self.cluster.put_pixels(PREPROCESS, picture, request_id)
        return (await self.cluster.encode_image(self.choose("encoder"), request_id, info(picture), pixels, WAIT_S)).embeddings

    async def leave(self, request_id: str, answering: asyncio.Task[list[int]]) -> None:
        """As a router does whose client left, at any moment."""
        await asyncio.wait([answering], timeout=self.rng.random() ** 2 * 0.05)
        self.num_left += not answering.done()
        await self.cluster.release(request_id)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await self.cluster.release(request_id)  # of what its last steps may have asked for

    def lie(self, prompt: Prompt) -> Told:
        """Somebody, who may not be there at all, has any number of its blocks."""
        source = PrefixSource(InstanceId(self.rng.choice([*self.placement, "ghost"])), self.rng.randrange(40))
        num_covered = self.rng.choice([0, self.rng.randrange(len(prompt.token_ids))])
        return Told(self.rng.choice([None, source]), num_covered)


def content_of(prefixes: PrefixCache, answered: list[tuple[Prompt, list[int]]]) -> dict[bytes, tuple[list[int], list[int]]]:
    """What must lie in blocks with these keys: slots and positions."""
    content = {}
    for prompt, output in answered:
        chain = prefixes.chain_of(prompt.token_ids, prompt.places(), prompt.salt)
        assert chain is not None
        chain.extend(output)
        slots = [*prompt.slots, *output]
        for index, key in enumerate(chain.keys):
            span = range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            content[key] = [slots[i] for i in span], list(span)
    return content


def check_truth(cluster: FakeCluster, answered: list[tuple[Prompt, list[int]]]) -> int:
    """How many blocks there were to check."""
    num_checked = 0
    for host in cluster.hosts.values():
        context = host._context
        kept, content = context.prefixes._tree._nodes, content_of(context.prefixes, answered)
        for key in kept.keys() & content.keys():
            kv = host.engine._kv[0, :, kept[key].block_id, :, 0, 0]
            assert (kv[0].tolist(), kv[1].tolist()) == content[key]
            num_checked += 1
        index = context.index._holders  # type: ignore[attr-defined]
        assert index["kv"].keys() == kept.keys()
        assert index["embeddings"].keys() == {mm_hash for mm_hash, _, _ in context.embeddings._pool._entries}
        assert context.embeddings._pool._num_pinned_bytes == 0
        assert not context.kv._leases
    return num_checked


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fake_cluster, cache_clients):
        monkeypatch.setattr(module, "WAIT_S", WAIT_S)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", PLACEMENTS)
async def test_any_mixture_ends_clean(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    cluster = FakeCluster(
        max_prefill_tokens=rng.choice((1, 6, 16, 64)),
        max_num_seqs=rng.choice((1, 3, 8)),
        embedding_cache_bytes=rng.choice((1, 100, 1000)),
        policy=rng.choice(["triptych", "elasticmm_unicache"]),
    )
    num_blocks = rng.choice((19, 22, 30, 64))
    for name, roles in PLACEMENTS[kind].items():
        engine = FakeEngine(num_blocks)
        engine.step_time_s = rng.choice((0.0, 0.001, 0.003))
        await cluster.start(name, roles, engine)
    await cluster.start(PREPROCESS, [])
    client = WildClient(cluster, kind, rng)
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_REQUESTS):
            prompt = random_prompt(rng)
            prompt.max_tokens = rng.choice((1, 1, 2, 5, 20))
            group.create_task(client.run(f"r{i}", prompt))
    for name in cluster.hosts:
        await cluster.until_at_rest(name)
    assert len(client.answered) == NUM_REQUESTS
    assert client.num_left > 0
    assert check_truth(cluster, client.answered) > 0
    await cluster.stop()
