"""The parity rule with a cache: many requests that share beginnings and pictures, in pools so small that they evict and preempt
all the time, over instances of every kind. Each answer is that of its own prompt, and at rest every block is accounted for.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from support.cache_clients import PLACEMENTS, Client, random_prompt
from support.fake_cluster import FakeCluster
from support.fake_engine import FakeEngine

NUM_REQUESTS = 24


@pytest.mark.parametrize("num_blocks", [19, 40])
@pytest.mark.parametrize("kind", PLACEMENTS)
async def test_answers_are_those_of_their_prompts(kind: str, num_blocks: int) -> None:
    rng = random.Random(f"{kind} {num_blocks}")
    cluster = FakeCluster(max_prefill_tokens=rng.choice((6, 16)), max_num_seqs=rng.choice((3, 8)), embedding_cache_bytes=100)
    for name, roles in PLACEMENTS[kind].items():
        await cluster.start(name, roles, FakeEngine(num_blocks))
    client = Client(cluster, PLACEMENTS[kind], rng)
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_REQUESTS):
            group.create_task(client.run(f"r{i}", random_prompt(rng)))
    stats = [host.report().resources.kv_prefixes for host in cluster.hosts.values()]  # type: ignore[union-attr]
    assert sum(one.num_hits for one in stats if one is not None) > 0
    assert sum(one.num_evicted for one in stats if one is not None) > 0
    await cluster.stop()
