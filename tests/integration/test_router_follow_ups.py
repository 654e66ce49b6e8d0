"""The router sends the end of a prompt to the decode instance that holds the rest, and the normal way when that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.fake_stages import ANSWER, TEXT, FakeStage, World, picture, words
from triptych.shared.errors import InstanceLost, Overloaded
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import DecodeRequest, PrefillRequest

TRACE = {"X-Triptych-Trace": "1"}
FIRST = {"role": "user", "content": [picture("a"), words(TEXT * 3)]}
TURN = [FIRST, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And then?"}]


@pytest.fixture
def world(caching_world: World) -> World:
    return caching_world


def move_kv(world: World, source: FakeStage, holder: FakeStage) -> None:
    """The holder has it now, and takes follow-ups."""
    world.index.drop(source.instance_id, "kv", source.kv)
    world.index.hold(holder.instance_id, "kv", sorted(source.kv))
    holder.kv, source.kv = source.kv, set()
    holder.takes_follow_ups = True
    holder.beat()


async def turns(world: World, **fields: Any) -> tuple[dict[str, FakeStage], list[dict[str, Any]]]:
    """The stages, and how the second turn went through them."""
    stages = world.add_all()
    assert (await world.ask(messages=[FIRST], **fields)).status_code == 200
    move_kv(world, stages["prefill"], stages["decode"])
    return stages, await second_turn(world, **fields)


async def second_turn(world: World, **fields: Any) -> list[dict[str, Any]]:
    response = await world.ask(messages=TURN, headers=TRACE, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    stages: list[dict[str, Any]] = response.json()["triptych"]["stages"]
    return stages


def places(trace: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["stage"], row["instance_id"].removesuffix("-abcd")) for row in trace]


async def test_a_text_only_turn_of_a_picture_chat_stays(world: World) -> None:
    stages, trace = await turns(world)
    assert places(trace) == [("prefill", "decode-0"), ("decode", "decode-0")]
    assert trace[0]["reason"].startswith("goes on where its KV is")
    prefill, decode = stages["decode"].seen[-2:]
    assert isinstance(prefill, PrefillRequest)
    assert isinstance(decode, DecodeRequest)
    assert prefill.prefix is None
    assert decode.kv.tensor.owner == stages["decode"].instance_id
    assert len(stages["prefill"].seen) == len(stages["encoder"].seen) == 1, "of the first turn"


async def test_it_stays_at_an_instance_that_prefills_for_text_too(world: World) -> None:
    """Prompts with pictures go elsewhere, but not when nearly all of it is there."""
    stages = {stage: world.add(f"{stage}-0", stage) for stage in ("preprocess", "encoder", "prefill")}
    text = world.add("text-0", "prefill", "decode")
    text.group = "text"
    text.beat()
    assert (await world.ask(messages=[FIRST])).status_code == 200
    assert len(stages["prefill"].seen) == 1
    world.index.drop(stages["prefill"].instance_id, "kv", stages["prefill"].kv)
    text.kv, stages["prefill"].kv = stages["prefill"].kv, set()
    world.index.hold(text.instance_id, "kv", sorted(text.kv))
    assert places(await second_turn(world)) == [("prefill", "text-0"), ("decode", "text-0")]


async def test_other_tenants_share_nothing(world: World) -> None:
    await turns(world, cache_salt="mine")
    assert places(await second_turn(world, cache_salt="yours"))[-2:] == [("prefill", "prefill-0"), ("decode", "decode-0")]


async def test_a_busy_holder_is_left_to_those_who_wait(world: World) -> None:
    stages, _ = await turns(world)
    stages["decode"].loads = (StageLoad("prefill", 1, 1, num_pending_tokens=100_000),)
    stages["decode"].beat()
    assert places(await second_turn(world)) == [("prefill", "prefill-0"), ("decode", "decode-0")]
    assert stages["prefill"].seen[-1].prefix.instance_id == stages["decode"].instance_id


async def test_a_queue_at_prefill_refuses_no_follow_up(world: World) -> None:
    stages, _ = await turns(world)
    stages["prefill"].loads = (StageLoad("prefill", num_pending_tokens=10_000, tokens_per_s=100.0),)
    stages["prefill"].beat()
    assert places(await second_turn(world, slo_ttft_ms=5000)) == [("prefill", "decode-0"), ("decode", "decode-0")]
    assert (await world.ask("Something else.", slo_ttft_ms=5000)).status_code == 503


async def test_a_refusal_is_followed_by_the_normal_way(world: World) -> None:
    stages, _ = await turns(world)

    async def refuse(request: PrefillRequest) -> Any:
        raise Overloaded("not here", code="stage_unavailable")

    stages["decode"].hooks[PrefillRequest] = refuse
    assert places(await second_turn(world)) == [("prefill", "prefill-0"), ("decode", "decode-0")]


async def test_a_lost_holder_costs_an_attempt(world: World) -> None:
    stages, _ = await turns(world)
    other = world.add("decode-1", "decode")

    async def die(request: PrefillRequest) -> Any:
        stages["decode"].die()
        raise InstanceLost("gone", instance_id=stages["decode"].instance_id)

    stages["decode"].hooks[PrefillRequest] = die
    assert places(await second_turn(world))[-2:] == [("prefill", "prefill-0"), ("decode", "decode-1")]
    assert other.seen


async def test_it_stays_in_its_group(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, block_size=4, policy="elasticmm") as world:
        world.is_caching = True
        _, trace = await turns(world)
        assert places(trace) == [("prefill", "decode-0"), ("decode", "decode-0")]
        await world.settled()
