"""A burst far over what the stages hold at once: everything waits its turn, nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest

from support.cases import Case, random_case
from support.client import ask, ask_all, session
from support.cluster import FEW_INFLIGHT, Cluster
from support.parity import judge_all
from support.reference import Reference
from support.watch import Watch

NUM_REQUESTS = 64
NUM_DISTINCT = 8
LIVE_EVERY_S = 0.05
LIVE_WITHIN_S = 2.0  # chosen: probes wait a second or more, and here all processes and clients share two cores


async def slowest_live_s(url: str, is_over: asyncio.Event) -> float:
    """Of /live, asked again and again until is_over."""
    slowest_s = 0.0
    async with session() as http:
        while not is_over.is_set():
            began_s = time.monotonic()
            async with http.get(f"{url}/live") as response:
                assert response.status == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), LIVE_EVERY_S)
    return slowest_s


@pytest.mark.timeout(300)
async def test_64_requests_of_4_pictures_at_once(cluster: Cluster, reference: Reference) -> None:
    distinct = [dataclasses.replace(random_case(1000 + index, num_pictures=4), max_tokens=12) for index in range(NUM_DISTINCT)]
    cases: list[Case] = [distinct[index % NUM_DISTINCT] for index in range(NUM_REQUESTS)]
    for case in distinct:
        reference.answer(case)
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        pids = {name: beat.resources.pid for name, beat in watch.beats.items()}
        async with session() as http:
            unloaded = [await ask(http, cluster.url, case) for case in distinct]
        judge_all(distinct, unloaded, reference)
        async with asyncio.TaskGroup() as group:
            is_over = asyncio.Event()
            live = group.create_task(slowest_live_s(cluster.url, is_over))
            loaded = await ask_all(cluster.url, cases, concurrency=NUM_REQUESTS)
            is_over.set()
        assert live.result() < LIVE_WITHIN_S, "the router's event loop was held up"
        judge_all(cases, loaded, reference)
        # The same tokens as without load: where a float tie makes a difference, judge_all has excused it just above.
        same = sum(answer.text == unloaded[index % NUM_DISTINCT].text for index, answer in enumerate(loaded))
        assert same >= NUM_REQUESTS - 2
        took_s = await watch.until_at_rest(5, "after 64 requests with 4 pictures each")
        slowest_s = max(answer.seconds for answer in loaded)
        print(f"slowest of 64: {slowest_s:.1f} s, of /live: {live.result():.3f} s; at rest {took_s:.1f} s after the last")
        assert pids.items() <= {name: beat.resources.pid for name, beat in watch.living().items()}.items(), "a process was lost"


@pytest.mark.timeout(120)
async def test_requests_over_the_bound_are_refused_at_once_and_the_rest_is_served(
    colocated_cluster: Cluster, reference: Reference
) -> None:
    case = dataclasses.replace(random_case(1100, num_pictures=1), max_tokens=48)
    answers = await ask_all(colocated_cluster.url, [case] * 24, concurrency=24)
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(served) >= FEW_INFLIGHT
    assert refused
    judge_all([case] * len(served), served, reference)
    for answer in refused:
        assert (answer.status, (answer.error or {})["code"]) == (503, "overloaded")
        assert 0 < float((answer.headers or {})["retry-after"]) <= 120
    async with session() as http, Watch(colocated_cluster.nats_url) as watch:
        assert reference.judge(case, await ask(http, colocated_cluster.url, case)) == "equal", "it recovers by itself"
        await watch.until_at_rest(5, "after an overload")
