"""An instance that only decodes computes the end of prompts of which it holds the rest, and goes on from its own blocks."""

from __future__ import annotations

import asyncio

import pytest

from support.fake_cluster import FakeCluster, FakeHost, error_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.shared.messages import InstanceId

PROMPT = list(range(1, 22))


async def start(policy: str = "triptych", engine: FakeEngine | None = None) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(policy=policy)
    await cluster.start("p", ["prefill"], FakeEngine(400))
    return cluster, await cluster.start("d", ["decode"], engine or FakeEngine(400))


async def next_turn(cluster: FakeCluster, request_id: str) -> list[int]:
    """After a first one by prefill and decode."""
    answer = await cluster.generate("p", "d", text_request(f"{request_id} before", PROMPT))
    return [*PROMPT, *answer, 50, 51, 52, 53]


def takes_follow_ups(cluster: FakeCluster, name: str) -> bool:
    beat = cluster.registry.get(InstanceId(name))
    assert beat is not None
    return beat.takes_follow_ups


async def test_a_second_turn_stays_where_its_kv_is() -> None:
    cluster, decode = await start()
    turn = await next_turn(cluster, "a")
    metrics, prefill = decode._context.metrics, cluster.hosts[InstanceId("p")]
    assert takes_follow_ups(cluster, "d")
    assert not takes_follow_ups(cluster, "p")
    assert decode.report().roles == ("decode",)
    num_moved, num_exports = metrics.kv_bytes_moved._value.get(), prefill.engine.num_exports
    assert num_moved > 0
    assert await cluster.generate("d", "d", text_request("a", turn)) == expected_tokens(turn, 0, 8)
    assert metrics.kv_bytes_moved._value.get() == num_moved
    assert (prefill.engine.num_exports, decode.engine.num_exports) == (num_exports, 0)
    assert next(size for step in decode.engine.steps for id, size in step if id == "a") == len(turn) - 28
    assert metrics.follow_ups._value.get() == 1
    await cluster.stop()


async def test_it_goes_on_beside_running_outputs() -> None:
    cluster, decode = await start()
    turn = await next_turn(cluster, "a")
    long = text_request("long", [7] * 9, max_tokens=60)
    decode.engine.gate.clear()  # or the machine may be so slow that one is over before the other comes
    await cluster.decode("d", long, await cluster.prefill("p", long))
    second = asyncio.create_task(cluster.generate("d", "d", text_request("a", turn)))
    await until(lambda: sum(load.num_waiting + load.num_running for load in decode.report().loads) == 2, "both are here")
    decode.engine.gate.set()
    assert await second == expected_tokens(turn, 0, 8)
    output = (await cluster.finished("long")).token_ids
    assert output == expected_tokens([7] * 9, 0, 60)[1:]
    sizes = [dict(step) for step in decode.engine.steps]
    first, last = (next(i for i in order if "long" in sizes[i]) for order in (range(len(sizes)), range(len(sizes))[::-1]))
    assert any("a" in step for step in sizes[first:last]), "in one engine, one step after the other"
    await cluster.stop()


async def test_what_is_not_here_is_refused() -> None:
    """The index was wrong, or the router has not heard of a switch: there are others for that."""
    cluster, decode = await start()
    long = [*PROMPT, *[9] * 300]
    await cluster.generate("p", "d", text_request("first", PROMPT))
    assert (await error_of(cluster.prefill("d", text_request("a", long)))).code == "stage_unavailable"
    assert all(request_id != "a" for step in decode.engine.steps for request_id, _ in step)
    await cluster.stop()


@pytest.mark.parametrize("policy", ["static", "modserve", "triptych_handed_over"])
async def test_policies_without_follow_ups(policy: str) -> None:
    cluster, _ = await start(policy)
    assert not takes_follow_ups(cluster, "d")
    assert (await error_of(cluster.prefill("d", text_request("a", PROMPT)))).code == "stage_unavailable"
    await cluster.stop()


async def test_cross_attention_has_none() -> None:
    engine = FakeEngine()
    engine.attends_to_all = True
    cluster, _ = await start(engine=engine)
    assert not takes_follow_ups(cluster, "d")
    await cluster.stop()


async def test_roles_that_are_switched() -> None:
    cluster, decode = await start()
    turn = await next_turn(cluster, "a")
    other = [8] * 600
    await cluster.start("d2", ["decode"], FakeEngine(400))
    await cluster.switch("d", "prefill")
    assert (takes_follow_ups(cluster, "d"), decode.report().roles) == (False, ("prefill",))
    assert await cluster.generate("d", "d2", text_request("b", other)) == expected_tokens(other, 0, 8)
    assert max(size for step in decode.engine.steps for _, size in step) == 512
    await cluster.switch("d", "decode")
    assert takes_follow_ups(cluster, "d")
    assert await cluster.generate("d", "d", text_request("a", turn)) == expected_tokens(turn, 0, 8), "it still holds that"
    assert (await error_of(cluster.prefill("d", text_request("c", [6] * 300)))).code == "stage_unavailable"
    await cluster.switch("d", "encoder")
    assert not takes_follow_ups(cluster, "d")
    assert (await error_of(cluster.prefill("d", text_request("e", turn)))).code == "stage_unavailable"
    await cluster.stop()


async def test_long_prompts_at_hand_when_prefill_is_taken_away_are_computed_in_short_steps() -> None:
    cluster, decode = await start()
    await cluster.start("d2", ["decode"], FakeEngine(400))
    await cluster.switch("d", "prefill")
    decode.engine.gate.clear()
    prompt = [8] * 900
    answer = asyncio.create_task(cluster.generate("d", "d2", text_request("b", prompt)))
    await until(decode.engine.is_inside.is_set, "its first step is under way")
    await cluster.switch("d", "decode")
    decode.engine.gate.set()
    assert await answer == expected_tokens(prompt, 0, 8)
    assert [size for step in decode.engine.steps for _, size in step] == [512, 256, 132]
    await cluster.stop()


async def test_who_drains_takes_none() -> None:
    cluster, decode = await start()
    turn = await next_turn(cluster, "a")
    decode._roles.close_intakes()
    assert (await error_of(cluster.prefill("d", text_request("a", turn)))).code == "stage_unavailable"
    await cluster.stop()
