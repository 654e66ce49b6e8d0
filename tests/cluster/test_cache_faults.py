"""The parity rule while the cache index forgets, hangs, dies and comes back, over pools so small that they always evict."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from support.cases import Case, ChatMessage, Picture, random_case
from support.client import Answer, ask, session
from support.cluster import Cluster
from support.parity import judge_all
from support.reference import Reference
from support.watch import Watch

pytestmark = pytest.mark.long

NUM_CASES = 10  # each again with its pictures in another order
CONCURRENCY = 6
SALTS = ("", "one", "two")
BLOCK_SIZE = 16
EMBEDDING_CACHE_BYTES = 24 << 10  # a few pictures
PAUSE_S = 0.2  # between two faults


def reordered(case: Case, rng: random.Random) -> Case:
    """The same, its pictures exchanged with each other."""
    pictures = case.pictures()
    rng.shuffle(pictures)
    rest = iter(pictures)
    messages = tuple(
        ChatMessage(message.role, tuple(next(rest) if isinstance(part, Picture) else part for part in message.parts))
        for message in case.messages
    )
    return dataclasses.replace(case, messages=messages)


def shared_cases() -> list[Case]:
    rng = random.Random("shared pictures")
    cases = [random_case(7000 + i, num_pictures=i % 4) for i in range(NUM_CASES)]
    return [*cases, *(reordered(case, rng) for case in cases)]


@pytest.fixture(scope="module")
def small_cluster(start_cluster: Callable[..., Cluster], reference: Reference) -> Cluster:
    """The KV pools hold the longest sequence and little else."""
    longest = max(reference.answer(case).num_prompt_tokens + case.max_tokens for case in shared_cases())
    config = reference.text_config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block_bytes = BLOCK_SIZE * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4
    return start_cluster(
        *("--encoder", "2", "--prefill", "2", "--decode", "2"),
        TRIPTYCH_KV_CACHE_BYTES=str((longest // BLOCK_SIZE + 8) * block_bytes),
        TRIPTYCH_EMBEDDING_CACHE_BYTES=str(EMBEDDING_CACHE_BYTES),
    )


async def nothing(cluster: Cluster) -> None:
    """The first time everything is new, the second time a part is known."""


def valkey_settings(cluster: Cluster) -> dict[str, str]:
    [config] = cluster.temp_dir.rglob("valkey.conf")
    return dict(line.split(maxsplit=1) for line in config.read_text().splitlines())  # type: ignore[misc]


async def flush(cluster: Cluster) -> None:
    words = valkey_settings(cluster)
    with contextlib.suppress(RedisError):
        async with Redis(port=int(words["port"]), password=words["requirepass"]) as client:
            await client.flushall()
            await client.script_flush()


async def hang(cluster: Cluster) -> None:
    pid = cluster.pid_of("valkey-server")
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.5)  # longer than a question is waited for, and than several are
    os.kill(pid, signal.SIGCONT)


async def kill(cluster: Cluster) -> None:
    for pid in cluster.pids_of("valkey-server"):
        os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def again_and_again(fault: Callable[[Cluster], object], cluster: Cluster) -> AsyncIterator[None]:
    async def go_on() -> None:
        while True:
            await fault(cluster)  # type: ignore[misc]
            await asyncio.sleep(PAUSE_S)

    going_on = asyncio.create_task(go_on())
    yield
    going_on.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await going_on
    for pid in cluster.pids_of("valkey-server"):
        os.kill(pid, signal.SIGCONT)


async def answers_to(url: str, cases: list[Case]) -> list[Answer]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int, case: Case) -> Answer:
        async with places:
            return await ask(http, url, case, stream=index % 2 == 0, cache_salt=SALTS[index % len(SALTS)])

    async with session() as http:
        return list(await asyncio.gather(*(one(index, case) for index, case in enumerate(cases))))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [nothing, flush, hang, kill])
async def test_answers_are_those_of_transformers(
    small_cluster: Cluster, reference: Reference, fault: Callable[[Cluster], object]
) -> None:
    cases = shared_cases() * 2
    async with Watch(small_cluster.nats_url) as watch:
        await watch.until_complete()
        async with again_and_again(fault, small_cluster):
            answers = await answers_to(small_cluster.url, cases)
        judge_all(cases, answers, reference)
        await watch.until_at_rest(10, f"after {fault.__name__}")
