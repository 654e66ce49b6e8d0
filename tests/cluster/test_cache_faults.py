"""The parity rule over pools so small that they always evict, while requests share beginnings and pictures, clients leave, and
the index forgets, hangs, dies, or instances do. In the end everything is accounted for, and bounded. One core does all of it
in minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

import aiohttp
import pytest
from nats.aio.msg import Msg

from support.cases import Case, ChatMessage, Picture, odd_picture, text
from support.client import Answer, ask, session
from support.cluster import Cluster
from support.index_server import IndexServer
from support.parity import judge_all
from support.raw_client import RawClient
from support.reference import Reference
from support.watch import Watch
from triptych.shared.messages import Heartbeat

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_CONVERSATIONS = 16
NUM_REQUESTS = 120  # of one test
NUM_KILL_REQUESTS = 300  # while instances die, and are started again after seconds
CONCURRENCY = 6
LEAVING_SHARE = 0.15  # of the clients, somewhere in the middle
SALTS = ("", "", "one", "two")
BLOCK_SIZE = 16
SPARE_BLOCKS = 8  # beside the longest sequence
EMBEDDING_CACHE_BYTES = 16 << 10  # a few pictures
PAUSE_S = 0.2  # between two faults
RECOVERED_WITHIN_S = 30.0
AT_REST_WITHIN_S = 10.0
CHECKED_WITHIN_S = 30.0  # chosen: an idle instance looks after five seconds, on a busy machine later
END_WITHIN_S = 20.0  # chosen: a server that ignores SIGTERM is killed after five
PLACEMENTS = {  # arguments of `triptych up`, and the transport
    "a stage each": (("--encoder", "2", "--prefill", "2", "--decode", "2"), "auto"),
    "several roles": (("--instances", "3"), "gloo"),
}

Fault = Callable[[], Awaitable[None]]


class Bounded(Watch):
    """Hears no heartbeat of a pool that is over its bytes."""

    def __init__(self, nats_url: str) -> None:
        super().__init__(nats_url)
        self.excesses: list[str] = []
        self.num_evicted: dict[str, Counter[str]] = {"kv": Counter(), "embeddings": Counter()}

    async def _on_message(self, message: Msg) -> None:
        await super()._on_message(message)
        for beat in self.beats.values():
            held = beat.resources
            if held.tensor_store_bytes > held.tensor_store_capacity_bytes:
                self.excesses.append(f"{beat.instance_id}: {held.tensor_store_bytes} bytes in its store")
            for name, pool in (("kv", held.kv_prefixes), ("embeddings", held.embeddings)):
                if pool is not None:
                    self.num_evicted[name][beat.instance_id] = pool.num_evicted
                    if pool.num_bytes > pool.capacity_bytes:
                        self.excesses.append(f"{beat.instance_id}: {pool.num_bytes} bytes of {name}")


def conversations() -> list[Case]:
    """They begin in a few ways and show a few pictures, again and in other orders."""
    rng = random.Random("conversations")
    beginnings = [text(rng, num_words) for num_words in (5, 40, 120)]
    pictures = [odd_picture(rng) for _ in range(5)]
    made = []
    for _ in range(NUM_CONVERSATIONS):
        parts: list[str | Picture] = [rng.choice(beginnings)]
        for picture in rng.choices(pictures, k=rng.choice((0, 1, 1, 2, 3))):
            parts += [picture, text(rng, rng.randint(1, 4))]
        made.append(Case((ChatMessage("user", tuple(parts)),), rng.choice((1, 4, 16, 40))))
    return made


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    """Conversations, and the next turn of each: text alone."""
    first = conversations()
    later = [
        dataclasses.replace(
            case,
            messages=(
                *case.messages,
                ChatMessage("assistant", (reference.answer(case).text,)),
                ChatMessage("user", (f"And number {index}?",)),
            ),
        )
        for index, case in enumerate(first)
    ]
    for case in later:
        reference.answer(case)
    return [*first, *later]


@pytest.fixture(scope="module", params=PLACEMENTS)
def small_cluster(
    request: pytest.FixtureRequest, start_cluster: Callable[..., Cluster], cases: list[Case], reference: Reference
) -> Cluster:
    """Its KV pools hold the longest sequence and little else."""
    longest = max(reference.answer(case).num_prompt_tokens + case.max_tokens for case in cases)
    config = reference.text_config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block_bytes = BLOCK_SIZE * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4
    args, transport = PLACEMENTS[request.param]
    return start_cluster(
        *args,
        TRIPTYCH_TRANSPORT=transport,
        TRIPTYCH_KV_CACHE_BYTES=str((longest // BLOCK_SIZE + SPARE_BLOCKS) * block_bytes),
        TRIPTYCH_EMBEDDING_CACHE_BYTES=str(EMBEDDING_CACHE_BYTES),
        TRIPTYCH_MAX_ATTEMPTS="5",
        TRIPTYCH_TRANSFER_TIMEOUT_S="5",
    )


@pytest.fixture
async def watch(small_cluster: Cluster) -> AsyncIterator[Bounded]:
    """After each test nothing is held, counts agree, pools stayed within their bytes, and the index is bounded."""
    async with Bounded(small_cluster.nats_url) as watch:
        await watch.until_complete(RECOVERED_WITHIN_S)
        yield watch
        await watch.until_at_rest(AT_REST_WITHIN_S, "after the faults")
        await watch.until_checked(CHECKED_WITHIN_S)
        assert not watch.excesses
    entries = await IndexServer(small_cluster).check()
    print(f"index: {dict(entries.num_by_kind)}, evicted: {[sum(counts.values()) for counts in watch.num_evicted.values()]}")


class Clients:
    """Ask for cases at random, each tenant for itself; some leave before their answer is there."""

    def __init__(self, cluster: Cluster, cases: Sequence[Case], seed: str) -> None:
        self._cluster, self._cases, self._rng = cluster, cases, random.Random(seed)
        self.answers: list[tuple[Case, Answer]] = []
        self.num_left = 0

    async def ask_all(self, num_requests: int = NUM_REQUESTS) -> None:
        places = asyncio.Semaphore(CONCURRENCY)
        async with session() as http, asyncio.TaskGroup() as group:

            async def one(case: Case, salt: str, stream: bool, leaves_after_s: float | None) -> None:
                async with places:
                    if leaves_after_s is None:
                        answer = await ask(http, self._cluster.url, case, stream=stream, cache_salt=salt)
                        self.answers.append((case, answer))
                        return
                    client = await RawClient.post(self._cluster.url, case.body(stream=stream, cache_salt=salt))
                    await asyncio.sleep(leaves_after_s)  # the moment of the fault is what is varied
                    client.cut()
                    self.num_left += 1

            for _ in range(num_requests):
                rng = self._rng
                leaves_after_s = rng.random() ** 2 * 0.3 if rng.random() < LEAVING_SHARE else None
                group.create_task(one(rng.choice(self._cases), rng.choice(SALTS), rng.random() < 0.5, leaves_after_s))


@contextlib.asynccontextmanager
async def again_and_again(fault: Fault) -> AsyncIterator[Counter[str]]:
    """Until the block ends; how often."""
    counted: Counter[str] = Counter()

    async def go_on() -> None:
        while True:
            await fault()
            counted["faults"] += 1
            await asyncio.sleep(PAUSE_S)

    going_on = asyncio.create_task(go_on())
    try:
        yield counted
    finally:
        going_on.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await going_on


def faults_of(index: IndexServer) -> dict[str, Fault]:
    rng = random.Random("faults")

    async def nothing() -> None:
        """Pools evict, clients leave."""

    async def killed() -> None:
        index.kill()

    return {"none": nothing, "flushed": index.flush, "hangs": lambda: index.hang(rng), "killed": killed}


@pytest.mark.parametrize("kind", ["none", "flushed", "hangs", "killed"])
async def test_answers_are_those_of_transformers(
    small_cluster: Cluster, watch: Bounded, cases: list[Case], reference: Reference, kind: str
) -> None:
    """Whatever happens to the index: it is slower, never wrong, and never an error."""
    clients = Clients(small_cluster, cases, f"index {kind}")
    async with again_and_again(faults_of(IndexServer(small_cluster))[kind]) as counted:
        await clients.ask_all()
        while counted["faults"] <= 3:
            await clients.ask_all()
    judge_all([case for case, _ in clients.answers], [answer for _, answer in clients.answers], reference)
    assert all(sum(counts.values()) > 0 for counts in watch.num_evicted.values()), "the pools were to be too small"
    assert clients.num_left > 5
    await until_the_index_is_back(small_cluster, next(case for case in cases if case.pictures()))


async def until_the_index_is_back(cluster: Cluster, case: Case) -> None:
    """A picture that comes again is neither sent nor decoded: only the index can tell where it is."""
    async with asyncio.timeout(RECOVERED_WITHIN_S), session() as http:
        while True:
            answer = await ask(http, cluster.url, case, cache_salt="is-it-back")
            assert answer.trace is not None, answer
            if all(stage["stage"] != "preprocess" for stage in answer.trace["stages"]):
                return


async def test_instances_that_die(small_cluster: Cluster, watch: Bounded, cases: list[Case], reference: Reference) -> None:
    """Some requests may end in a typed error, none in a wrong answer."""
    rng = random.Random("instances that die")

    async def kill_one() -> None:
        victim = rng.choice([beat for beat in watch.living().values() if beat.service == "instance"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.resources.pid, signal.SIGKILL)
        await until_replaced(watch, [victim])

    clients = Clients(small_cluster, cases, "instances die")
    async with again_and_again(kill_one) as counted:
        await clients.ask_all(NUM_KILL_REQUESTS)
    answered = [(case, answer) for case, answer in clients.answers if answer.error is None]
    judge_all([case for case, _ in answered], [answer for _, answer in answered], reference)
    errors = [answer.error for _, answer in clients.answers if answer.error is not None]
    assert all(error["type"] == "server_error" for error in errors), errors
    assert len(answered) > len(errors)
    assert counted["faults"] > 1
    print(f"{counted['faults']} kills: {len(answered)} answered, {Counter(error['code'] for error in errors)}")


async def test_what_the_dead_held_is_never_served(
    small_cluster: Cluster, watch: Bounded, cases: list[Case], reference: Reference
) -> None:
    """All instances are killed and started again. The index still names the dead, and nobody believes it."""
    index, url, salt = IndexServer(small_cluster), small_cluster.url, "asked-before"
    case = next(case for case in cases if len(case.pictures()) == 1)
    async with session() as http:
        await until_cached(http, url, case, salt)
        dead = {beat.instance_id: beat for beat in watch.living().values() if beat.service == "instance"}
        for beat in dead.values():
            os.kill(beat.resources.pid, signal.SIGKILL)
        await until_replaced(watch, dead.values())
        holders = {holder.partition("#")[0] for holder in (await index.check()).holders}
        assert holders & dead.keys(), "the index was to name them still"
        answer = await ask(http, url, case, cache_salt=salt)
        assert reference.judge(case, answer) == "equal"
        assert answer.trace is not None
        assert answer.trace["attempts"] == 1, "a dead holder was asked"
        assert num_cached(answer) == 0
        assert [stage["stage"] for stage in answer.trace["stages"]] == ["preprocess", "encoder", "prefill", "decode"]
        assert not {stage["instance_id"] for stage in answer.trace["stages"]} & dead.keys()
        await until_cached(http, url, case, salt)


def test_it_ends_while_its_index_hangs(small_cluster: Cluster) -> None:
    """After all of that. Nobody waits for what does not answer."""
    IndexServer(small_cluster).stop()
    began_s = time.monotonic()
    assert small_cluster.stop() == 0
    assert time.monotonic() - began_s < END_WITHIN_S
    assert small_cluster.processes() == []


async def until_replaced(watch: Watch, dead: Collection[Heartbeat]) -> None:
    names, ids = {beat.name for beat in dead}, {beat.instance_id for beat in dead}

    def are_replaced(beats: dict[str, Heartbeat]) -> bool:
        return names <= {beat.name for id_, beat in beats.items() if id_ not in ids and beat.state == "ready"}

    await watch.until(are_replaced, RECOVERED_WITHIN_S, f"{sorted(names)} to be replaced")


async def until_cached(http: aiohttp.ClientSession, url: str, case: Case, salt: str) -> None:
    async with asyncio.timeout(RECOVERED_WITHIN_S):
        while not num_cached(await ask(http, url, case, cache_salt=salt)):
            pass


def num_cached(answer: Answer) -> int:
    assert answer.usage is not None, answer
    details: dict[str, Any] = answer.usage["prompt_tokens_details"]
    return int(details["cached_tokens"])
