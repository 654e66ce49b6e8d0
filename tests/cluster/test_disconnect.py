"""A client that goes away: whatever its request holds, in whatever stage, is free within 2 seconds."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from support.cases import Case, random_case
from support.client import ask, session
from support.cluster import Cluster
from support.raw_client import RawClient
from support.reference import Reference
from support.watch import Watch

FREE_WITHIN_S = 2.0  # the acceptance bound
NUM_TOKENS = 4000  # far more than are made before the client leaves


def endless(seed: int, num_pictures: int = 2) -> Case:
    return dataclasses.replace(random_case(seed, num_pictures), max_tokens=NUM_TOKENS)


async def is_busy(watch: Watch, stage: str) -> None:
    await watch.until(
        lambda beats: any(
            load.num_waiting + load.num_running > 0 for beat in beats.values() for load in beat.loads if load.stage == stage
        ),
        20,
        f"{stage} to have work",
    )


async def test_after_two_chunks_of_a_stream(cluster: Cluster) -> None:
    async with Watch(cluster.nats_url) as watch:
        client = await RawClient.post(cluster.url, endless(2000).body(stream=True))
        await client.read_chunks(2)
        client.cut()
        took_s = await watch.until_at_rest(FREE_WITHIN_S, "the client of a stream has gone")
    print(f"free after {took_s:.2f} s")


async def test_while_one_json_answer_is_made(cluster: Cluster) -> None:
    async with Watch(cluster.nats_url) as watch:
        client = await RawClient.post(cluster.url, endless(2001).body())
        await is_busy(watch, "decode")
        client.cut()
        await watch.until_at_rest(FREE_WITHIN_S, "the client of a JSON answer has gone")


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.1, 0.3])
async def test_at_any_moment(cluster: Cluster, delay_s: float) -> None:
    """Cut while pictures are decoded, encoded, or the prompt is computed, as the delay has it."""
    async with Watch(cluster.nats_url) as watch:
        clients = [await RawClient.post(cluster.url, endless(2010 + i, 4).body(stream=i % 2 == 0)) for i in range(4)]
        await asyncio.sleep(delay_s)  # the moment of the fault is what is varied; nothing waits for anything here
        for client in clients:
            client.cut()
        await watch.until_at_rest(FREE_WITHIN_S, f"four clients have gone after {delay_s} s")
        # Again: rest could have been seen before the requests had come to the stages at all.
        await watch.until_at_rest(FREE_WITHIN_S, f"four clients have gone after {delay_s} s, a little later")


async def test_while_queued_behind_others(cluster: Cluster) -> None:
    """48 requests at once: some stream, most still wait in the stages. All of their clients go at the same time."""
    async with Watch(cluster.nats_url) as watch:
        clients = await asyncio.gather(
            *(RawClient.post(cluster.url, endless(2100 + i, i % 3).body(stream=True)) for i in range(48))
        )
        await is_busy(watch, "decode")
        for client in clients:
            client.cut()
        await watch.until_at_rest(FREE_WITHIN_S, "48 clients have gone")


async def test_the_next_request_is_answered_rightly(cluster: Cluster, reference: Reference) -> None:
    """The same prompt as one that was cut off: nothing of the first is left to disturb it."""
    case = random_case(2200, num_pictures=2)
    client = await RawClient.post(cluster.url, dataclasses.replace(case, max_tokens=NUM_TOKENS).body(stream=True))
    await client.read_chunks(2)
    client.cut()
    async with session() as http:
        assert reference.judge(case, await ask(http, cluster.url, case)) == "equal"


async def test_others_are_not_disturbed(cluster: Cluster, reference: Reference) -> None:
    case = random_case(2201, num_pictures=3)
    async with session() as http, asyncio.TaskGroup() as group:
        steady = [group.create_task(ask(http, cluster.url, case, stream=i % 2 == 0)) for i in range(4)]
        for seed in range(2210, 2216):
            client = await RawClient.post(cluster.url, endless(seed).body(stream=True))
            await client.read_chunks(1)
            client.cut()
    assert [reference.judge(case, task.result()) for task in steady] == ["equal"] * 4
