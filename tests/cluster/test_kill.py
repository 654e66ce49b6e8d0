"""kill -9 of any process under load: every request ends, in tokens or a typed error; the cluster mends itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import psutil
import pytest

from support.cases import Case, chat, random_case
from support.client import Answer, ask, session
from support.cluster import Cluster, wait_for
from support.reference import Reference
from support.watch import Watch

REQUEST_TIMEOUT_S = 40.0
RECOVER_WITHIN_S = 15.0  # the acceptance bound
FREE_WITHIN_S = 5.0  # the acceptance bound, for what a killed router's requests hold
TRANSFER_TIMEOUT_S = 5.0  # how long a pull may pin a tensor when nobody says that it is over
MAX_OUTPUT_TOKENS = 800
NUM_CLIENTS = 8
TYPED_STATUS = {500, 502, 503, 504}
ROUTER_GONE = 0  # status of an Answer whose connection broke

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def mortal_cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Every kill leaves it whole again, which is what is tested: so one is enough for all of them."""
    return start_cluster(TRIPTYCH_REQUEST_TIMEOUT_S=str(REQUEST_TIMEOUT_S), TRIPTYCH_TRANSFER_TIMEOUT_S=str(TRANSFER_TIMEOUT_S))


@pytest.fixture(scope="module")
def load_cases(reference: Reference) -> list[Case]:
    made = [dataclasses.replace(random_case(3000 + i, num_pictures=i % 4), max_tokens=24 + 8 * (i % 3)) for i in range(12)]
    for case in made:
        reference.answer(case)
    return made


@dataclass
class Load:
    """Clients that ask one request after the other until told to stop; what each got, and for which case. Each case is new to
    the cluster at first and known the second time; always new when is_cold."""

    url: str
    cases: list[Case]
    is_cold: bool = False
    salt: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    results: list[tuple[Case, Answer]] = field(default_factory=list)
    is_stopping: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        index = number
        while not self.is_stopping:
            case = self.cases[index % len(self.cases)]
            salt = f"{self.salt}-{index if self.is_cold else index // (2 * len(self.cases))}"
            begin_s = time.monotonic()
            try:
                answer = await ask(http, self.url, case, stream=index % 2 == 0, cache_salt=salt)
            except (aiohttp.ClientError, ConnectionError) as error:
                answer = Answer(ROUTER_GONE, error={"message": repr(error)}, seconds=time.monotonic() - begin_s)
                await asyncio.sleep(0.2)  # a client's own pause before it connects again
            self.results.append((case, answer))
            self.news.set()
            index += NUM_CLIENTS

    async def reach(self, count: int) -> None:
        """Waits until there are `count` results."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S + 10):
            while len(self.results) < count:
                self.news.clear()
                await self.news.wait()


def judge(load: Load, reference: Reference, is_router_killed: bool) -> str:
    """Fails on a wrong answer, an untyped error or a late end; a summary of the rest."""
    num_equal, errors = 0, []
    for case, answer in load.results:
        assert answer.seconds < REQUEST_TIMEOUT_S + 2, f"an answer took {answer.seconds:.1f} s: {answer}"
        if answer.error is None:
            verdict = reference.judge(case, answer)
            assert not verdict.startswith("wrong"), verdict
            num_equal += 1
        elif answer.status == ROUTER_GONE:
            assert is_router_killed, f"the connection broke: {answer.error}"
            errors.append("connection lost")
        else:
            assert answer.status in TYPED_STATUS | {200}, answer
            assert answer.error["type"] == "server_error", answer.error
            assert answer.error["code"], answer.error
            errors.append(f"{answer.status} {answer.error['code']}")
    counted = {error: errors.count(error) for error in sorted(set(errors))}
    return f"{num_equal} answered, errors: {json.dumps(counted)}"


async def run_load_and_kill(load: Load, kill: Callable[[], None], check_mended: Callable[[float], Awaitable[None]]) -> None:
    """Kills when every client has had an answer, checks while the load goes on, and ends it a while after that.
    check_mended gets the time of the kill."""
    async with session(timeout_s=REQUEST_TIMEOUT_S + 5) as http, asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(load.client(http, number))
        await load.reach(NUM_CLIENTS)
        killed_s = time.monotonic()
        kill()
        await check_mended(killed_s)
        await load.reach(len(load.results) + NUM_CLIENTS)
        load.is_stopping = True


async def check_recovered(cluster: Cluster, reference: Reference, case: Case, killed_s: float) -> None:
    """/ready is 200 and the next request is answered, at most 15 s after the kill."""
    await asyncio.to_thread(wait_for, cluster.is_ready, 2 * RECOVER_WITHIN_S, "/ready")
    async with session() as http:
        answer = await ask(http, cluster.url, case)
    assert reference.judge(case, answer) == "equal"
    took_s = time.monotonic() - killed_s
    assert took_s < RECOVER_WITHIN_S, f"the first answer of the mended cluster came {took_s:.1f} s after the kill"


@pytest.mark.parametrize("stage", ["preprocess", "encoder", "prefill", "decode", "scaler", "router"])
async def test_of_a_stage(mortal_cluster: Cluster, reference: Reference, load_cases: list[Case], stage: str) -> None:
    cluster = mortal_cluster
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        victim = watch.of(stage)
        load = Load(cluster.url, load_cases)

        def is_replaced(_beats: object) -> bool:
            successor = watch.of(victim.name)
            return successor.instance_id != victim.instance_id and successor.state == "ready"

        async def check_mended(killed_s: float) -> None:
            took_s = await watch.until(is_replaced, RECOVER_WITHIN_S, f"a new {stage}")
            print(f"{stage}: replaced after {took_s:.1f} s")
            await check_recovered(cluster, reference, load_cases[3], killed_s)

        await run_load_and_kill(load, lambda: os.kill(victim.resources.pid, signal.SIGKILL), check_mended)
        print(f"{stage}: {judge(load, reference, stage == 'router')}")
        await watch.until_at_rest(FREE_WITHIN_S, f"after the kill of {stage}")


async def test_of_decode_workers(mortal_cluster: Cluster, reference: Reference, load_cases: list[Case]) -> None:
    """Nobody notices: their pictures are decoded again."""
    async with Watch(mortal_cluster.nats_url) as watch:
        await watch.until_complete()
        preprocess = psutil.Process(watch.of("preprocess").resources.pid)
        load = Load(mortal_cluster.url, [case for case in load_cases if case.pictures()], is_cold=True)
        killed: set[int] = set()

        def kill() -> None:
            workers = preprocess.children()
            assert workers
            killed.update(worker.pid for worker in workers)
            for worker in workers:
                worker.kill()

        async def check_mended(_killed_s: float) -> None:
            for _ in range(3):
                await load.reach(
                    len(load.results) + 2 * NUM_CLIENTS
                )  # the second half of them were decoded after the last kill
                kill()

        await run_load_and_kill(load, kill, check_mended)
        assert len(killed) >= 4
        told = judge(load, reference, is_router_killed=False)
        assert told.endswith("errors: {}"), told
        await watch.until_at_rest(FREE_WITHIN_S, "after the kills of decode workers")


@pytest.mark.parametrize("server", ["nats-server", "valkey-server"])
async def test_of_an_embedded_server(
    mortal_cluster: Cluster, reference: Reference, load_cases: list[Case], server: str
) -> None:
    cluster = mortal_cluster
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
    pid = cluster.pid_of(server)
    load = Load(cluster.url, load_cases)

    async def check_mended(killed_s: float) -> None:
        await asyncio.to_thread(wait_for, lambda: cluster.pids_of(server) not in ([], [pid]), 10, f"a new {server}")
        async with Watch(cluster.nats_url) as watch:
            await watch.until_complete(RECOVER_WITHIN_S)
        await check_recovered(cluster, reference, load_cases[3], killed_s)

    await run_load_and_kill(load, lambda: os.kill(pid, signal.SIGKILL), check_mended)
    print(f"{server}: {judge(load, reference, False)}")
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        # What was on its way when NATS died is lost, the end of a pull too: the tensor is free when the pull's time is over.
        await watch.until_at_rest(FREE_WITHIN_S + TRANSFER_TIMEOUT_S, f"after the kill of {server}")


async def test_a_killed_router_holds_nothing(mortal_cluster: Cluster, load_cases: list[Case]) -> None:
    """All requests of the router are under way when it dies: the stages free them within 5 s, nobody tells them to."""
    cluster = mortal_cluster
    endless = [dataclasses.replace(case, max_tokens=1500) for case in load_cases]
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        victim = watch.of("router")
        async with session(timeout_s=30) as http:
            asking = [asyncio.create_task(ask(http, cluster.url, case, stream=True)) for case in endless]
            await watch.until(
                lambda beats: any(
                    load.num_running > 2 for beat in beats.values() for load in beat.loads if load.stage == "decode"
                ),
                20,
                "decode to be busy",
            )
            os.kill(victim.resources.pid, signal.SIGKILL)
            ended = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
        assert any(isinstance(one, BaseException) for one in ended)
        took_s = await watch.until_at_rest(FREE_WITHIN_S, "the router was killed", services=("preprocess", "instance"))
        print(f"free {took_s:.1f} s after the router's end")
        await watch.until_complete()
        await asyncio.to_thread(wait_for, cluster.is_ready, RECOVER_WITHIN_S, "/ready")


async def test_after_all_of_that_sigterm_lets_an_admitted_stream_finish(mortal_cluster: Cluster) -> None:
    """As if nothing were. And ends everything."""
    cluster = mortal_cluster
    case = chat("A long story, please.", max_tokens=MAX_OUTPUT_TOKENS)
    async with session() as http:
        undisturbed = await ask(http, cluster.url, case, stream=True, cache_salt="undisturbed")
        asking = asyncio.create_task(ask(http, cluster.url, case, stream=True, cache_salt="disturbed"))
        async with Watch(cluster.nats_url) as watch:
            await watch.until(
                lambda beats: any(load.num_running for beat in beats.values() for load in beat.loads if load.stage == "decode"),
                20,
                "the stream to run",
            )
        assert not asking.done()
        stopping = asyncio.create_task(asyncio.to_thread(cluster.stop, signal.SIGTERM))
        answer = await asyncio.wait_for(asking, 60)
        assert await asyncio.wait_for(stopping, 60) == 0, cluster.log()
    assert answer.error is None, answer
    assert answer.finish_reason in {"length", "stop"}
    assert (answer.text, answer.usage) == (undisturbed.text, undisturbed.usage)
    assert cluster.processes() == []
