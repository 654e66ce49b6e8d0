"""Requests that are handed over between decode instances: in the middle, while they wait, and when nobody takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from support.fake_cluster import ROUTER, FakeCluster, error_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.services.decode import hand_over as hand_over_module
from triptych.services.decode import role as decode_role
from triptych.services.decode.hand_over import MAX_UNDER_WAY
from triptych.shared.messages import InstanceId, Lost, PrefillReply, PrefillRequest, ReleaseRequest, RequestId

PROMPT = [1, 2, 3, 4, 5, 6, 7]
Begun = tuple[PrefillRequest, PrefillReply]
STEP_S = 0.001  # of decode engines: an output of a hundred tokens takes many times as long as to ask for its hand-over


async def start(decodes: int = 2, engine: FakeEngine | None = None, **settings: Any) -> FakeCluster:
    """An instance p that prefills, d0, d1, ... that decode; engine: of d0."""
    cluster = FakeCluster(**settings)
    await cluster.start("p", ["prefill"], FakeEngine(400))
    for i in range(decodes):
        decoding = engine if i == 0 and engine else FakeEngine(200)
        decoding.step_time_s = STEP_S
        await cluster.start(f"d{i}", ["decode"], decoding)
    return cluster


async def begin(cluster: FakeCluster, request_id: str, max_tokens: int, name: str = "d0") -> Begun:
    """A request that has made some tokens."""
    request = text_request(request_id, PROMPT, max_tokens)
    reply = await cluster.prefill("p", request)
    await cluster.decode(name, request, reply)
    await until(lambda: len(cluster.stream(request_id).token_ids) > 3, f"{request_id} runs")
    return request, reply


async def output_of(cluster: FakeCluster, request: PrefillRequest, reply: PrefillReply) -> list[int]:
    stream = await cluster.finished(request.request_id)
    assert stream.error_code is None, stream.last
    return [reply.first_token, *stream.token_ids]


async def go_on_at(cluster: FakeCluster, name: str, begun: Iterable[Begun]) -> int:
    """Until each has been handed over and goes on there, or has ended. How many were on the way at a time, at most."""
    waiting = {request.request_id: (request, reply) for request, reply in begun}
    most = 0
    while waiting:
        await until(lambda: any(cluster.stream(id_).kv or cluster.stream(id_).last for id_ in waiting), "one is handed over")
        streams = {id_: cluster.stream(id_) for id_ in waiting}
        most = max(most, sum(stream.kv is not None for stream in streams.values()))
        for id_, stream in streams.items():
            if stream.kv is not None:
                await cluster.go_on(name, *waiting.pop(id_))
            elif stream.last is not None:
                del waiting[id_]
    return most


async def test_from_hand_to_hand() -> None:
    """Each time its KV moves, with the output in it, and nothing stays behind."""
    cluster = await start(3)
    request, reply = await begin(cluster, "r", 120)
    for here, there in (("d0", "d1"), ("d1", "d2"), ("d2", "d0")):
        await cluster.hand_over(here)
        await cluster.handed_over("r")
        num_before = len(cluster.stream("r").token_ids)
        await cluster.go_on(there, request, reply)
        await until(lambda n=num_before: len(cluster.stream("r").token_ids) > n, f"it goes on at {there}")
    assert await output_of(cluster, request, reply) == expected_tokens(PROMPT, 0, 120)
    last = cluster.stream("r").last
    assert last is not None
    assert last.time is not None
    assert last.time.instance_id == "d0"
    assert cluster.hosts[InstanceId("d1")].engine.steps, "it ran there"
    await cluster.stop()


async def test_its_blocks_are_known_where_it_was_and_where_it_went() -> None:
    cluster = await start(policy="triptych")
    request, reply = await begin(cluster, "r", 100)
    await cluster.hand_over("d0")
    await cluster.handed_over("r")
    num_moved = len(PROMPT) + len(cluster.stream("r").token_ids)  # the last one was not computed yet
    await cluster.go_on("d1", request, reply)
    await output_of(cluster, request, reply)
    await cluster.until_at_rest("d0")
    await cluster.until_at_rest("d1")
    assert cluster.hosts[InstanceId("d0")].pool.num_cached == num_moved // 4
    assert cluster.hosts[InstanceId("d1")].pool.num_cached == (len(PROMPT) + 99) // 4
    await cluster.stop()


async def test_a_switch_hands_over_all_a_few_at_a_time() -> None:
    """The others go on meanwhile; the instance does other work at once."""
    cluster = await start()
    begun = [await begin(cluster, f"r{i}", 150) for i in range(2 * MAX_UNDER_WAY)]
    await cluster.switch("d0", "prefill")
    assert cluster.hosts[InstanceId("d0")].report().roles == ("prefill",)
    other = text_request("other", [8, 9], 1)
    assert (await cluster.prefill("d0", other)).first_token == expected_tokens([8, 9], 0, 1)[0]
    assert await go_on_at(cluster, "d1", begun) <= MAX_UNDER_WAY
    await until(lambda: len(cluster.hosts[InstanceId("d0")]._roles.all()) == 1, "the role has ended")
    for request, reply in begun:
        assert await output_of(cluster, request, reply) == expected_tokens(PROMPT, 0, 150)
    await cluster.release("other")
    await cluster.stop()


async def test_a_switch_back_takes_new_requests_and_keeps_those_at_hand() -> None:
    cluster = await start(1)
    begun = await begin(cluster, "r", 400)
    await cluster.switch("d0", "encoder")
    assert (await error_of(cluster.decode("d0", *begun))).code == "stage_unavailable"
    await cluster.switch("d0", "decode")
    await cluster.start("d1", ["decode"], FakeEngine(200))
    other = await begin(cluster, "other", 8)
    for request, reply in (begun, other):
        await output_of(cluster, request, reply)
    assert cluster.hosts[InstanceId("d0")].report().roles == ("decode",)
    await cluster.stop()


async def test_where_nobody_else_decodes_requests_end_here() -> None:
    cluster = await start(1)
    begun = await begin(cluster, "r", 60)
    await cluster.switch("d0", "prefill", "encoder")
    assert await output_of(cluster, *begun) == expected_tokens(PROMPT, 0, 60)
    await until(lambda: len(cluster.hosts[InstanceId("d0")]._roles.all()) == 2, "the role has ended")
    await cluster.stop()


async def test_what_nobody_else_takes_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is handed over again a while later."""
    cluster = await start()
    monkeypatch.setattr(decode_role, "STAYS_S", 0.05)
    begun = await begin(cluster, "r", 700)
    await cluster.switch("d0", "encoder")
    await cluster.handed_over("r")
    await cluster.go_on("d0", *begun)
    num_before = len(cluster.stream("r").token_ids)
    await until(lambda: len(cluster.stream("r").token_ids) > num_before, "it goes on here")
    await cluster.handed_over("r")
    await cluster.release("r")
    await cluster.stop()


async def test_those_that_wait_are_handed_over_as_they_came() -> None:
    """One waits for a place in the batch, one is not even pulled: whoever goes on finds its KV at prefill."""
    cluster = await start(max_num_seqs=1, kv_cache_bytes=1 << 16)
    engine = cluster.hosts[InstanceId("d0")].engine
    await begin(cluster, "running", 700)
    in_hand = cluster.hosts[InstanceId("d0")].role._in_hand
    requests = [text_request(id_, PROMPT, 10) for id_ in ("pulled", "not pulled")]
    replies = [await cluster.prefill("p", request) for request in requests]
    await cluster.decode("d0", requests[0], replies[0])
    await until(lambda: cluster.hosts[InstanceId("d0")].role._batch._waiting != [], "it is pulled")
    async with in_hand.hold(in_hand.capacity - in_hand.num_held, "somebody"):
        await cluster.decode("d0", requests[1], replies[1])
        await cluster.hand_over("d0")
        await cluster.handed_over("pulled")
    await cluster.handed_over("not pulled")
    kv = {id_: cluster.stream(id_).kv for id_ in ("pulled", "not pulled")}
    assert kv["not pulled"] == replies[1].kv
    assert kv["pulled"] is not None
    assert kv["pulled"].tensor.owner == "d0"
    assert not any(id_ != "running" for step in engine.steps for id_, _ in step)
    await cluster.handed_over("running")
    await cluster.release("running")
    for request, reply in zip(requests, replies, strict=True):
        await cluster.go_on("d1", request, reply)
        assert await output_of(cluster, request, reply) == expected_tokens(PROMPT, 0, 10)
    await cluster.stop()


async def test_preempted_requests_are_handed_over() -> None:
    """Of six in a pool of 16 blocks some are out of it; what of them was shared is computed again."""
    cluster = await start(engine=FakeEngine(16))
    prompts = {f"r{i}": [i, 2 * i, 3 * i, 7, 8] for i in range(6)}
    requests = {id_: text_request(id_, prompt, 35) for id_, prompt in prompts.items()}
    replies = {id_: await cluster.prefill("p", request) for id_, request in requests.items()}
    decode = cluster.hosts[InstanceId("d0")]
    decode.engine.step_time_s = 0.002
    for id_, request in requests.items():
        await cluster.decode("d0", request, replies[id_])
    await until(lambda: any(job.is_preempted for job in decode.role._jobs), "one is preempted")
    await cluster.hand_over("d0")
    await go_on_at(cluster, "d1", [(request, replies[id_]) for id_, request in requests.items()])
    for id_, request in requests.items():
        assert await output_of(cluster, request, replies[id_]) == expected_tokens(prompts[id_], 0, 35)
    await cluster.stop()


async def test_a_whole_output_is_handed_over_with_what_was_not_sent() -> None:
    cluster = await start()
    request = text_request("r", PROMPT, 150)
    reply = await cluster.prefill("p", request)
    await cluster.decode("d0", request, reply, whole=True)
    await until(lambda: len(cluster.hosts[InstanceId("d0")].engine.steps) > 5, "it runs")
    await cluster.hand_over("d0")
    await cluster.handed_over("r")
    await cluster.go_on("d1", request, reply)
    assert await output_of(cluster, request, reply) == expected_tokens(PROMPT, 0, 150)
    await cluster.stop()


@pytest.mark.parametrize("end", ["released", "router lost"])
async def test_nothing_stays_of_one_that_is_not_taken(end: str) -> None:
    cluster = await start()
    await begin(cluster, "r", 300)
    await cluster.hand_over("d0")
    await cluster.handed_over("r")
    decode = cluster.hosts[InstanceId("d0")]
    assert decode.transport.usage()[2] == 1
    if end == "released":
        await decode.handle(ReleaseRequest(RequestId("r")))
    else:
        cluster.registry.on_event(Lost(ROUTER, "router-0", 9, expected=False), 0.0)
        decode.on_router_lost(ROUTER)
    assert decode.transport.usage()[2] == 0
    await cluster.stop()


async def test_only_as_many_as_asked_for() -> None:
    """The youngest: they have least to move."""
    cluster = await start()
    begun = [await begin(cluster, f"r{i}", 250) for i in range(4)]
    await cluster.hand_over("d0", num_tokens=len(PROMPT) + 6)
    await cluster.handed_over("r3")
    for request, reply in begun[:3]:
        await output_of(cluster, request, reply)
    await cluster.go_on("d1", *begun[3])
    await output_of(cluster, *begun[3])
    await cluster.stop()


async def test_a_role_whose_time_to_end_is_over_gives_its_requests_up() -> None:
    """So that they are tried elsewhere, at once."""
    cluster = await start(1)
    await begin(cluster, "running", 100_000)
    decode = cluster.hosts[InstanceId("d0")]
    await cluster.switch("d0", "prefill", timeout_s=0.0)
    assert (await cluster.finished("running")).error_code == "given_up"
    decode.engine.gate.clear()
    decode.engine.is_inside.clear()
    waits = asyncio.create_task(cluster.prefill("d0", text_request("waits", PROMPT)))
    await until(decode.engine.is_inside.is_set, "it is in a step")
    await cluster.switch("d0", timeout_s=0.0)
    decode.engine.gate.set()
    assert (await error_of(waits)).code == "given_up"
    for request_id in ("running", "waits"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_those_that_were_preempted_and_share_blocks_leave_when_they_have_theirs_again() -> None:
    """Nothing is computed again for a switch."""
    cluster = await start(engine=FakeEngine(28))
    shared = list(range(1, 14))
    prompts = {f"r{i}": [*shared, i] for i in range(6)}
    requests = {id_: text_request(id_, prompt, 40) for id_, prompt in prompts.items()}
    replies = {id_: await cluster.prefill("p", request) for id_, request in requests.items()}
    decode = cluster.hosts[InstanceId("d0")]
    decode.engine.step_time_s = 0.002
    for id_, request in requests.items():
        await cluster.decode("d0", request, replies[id_])
    await until(
        lambda: any(job.is_preempted and job.shared for job in decode.role._jobs), "one is preempted, without what it shared"
    )
    await cluster.switch("d0", "encoder")
    await go_on_at(cluster, "d1", [(request, replies[id_]) for id_, request in requests.items()])
    for id_, request in requests.items():
        assert await output_of(cluster, request, replies[id_]) == expected_tokens(prompts[id_], 0, 40)
    assert sum(cluster.stream(id_).num_moves for id_ in requests) > 2
    await cluster.stop()


async def test_those_that_nobody_pulls_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await start()
    monkeypatch.setattr(hand_over_module, "UNDER_WAY_S", 0.05, raising=False)
    request_ids = [f"r{i}" for i in range(MAX_UNDER_WAY + 2)]
    for id_ in request_ids:
        await begin(cluster, id_, 3000)
    await cluster.hand_over("d0")
    for id_ in request_ids:
        await cluster.handed_over(id_)
    for id_ in request_ids:
        await cluster.release(id_)
    await cluster.stop()


async def test_a_role_lasts_until_what_it_handed_over_is_elsewhere() -> None:
    """Else it could not come back where nobody else takes it."""
    cluster = await start()
    begun = await begin(cluster, "r", 300)
    decode = cluster.hosts[InstanceId("d0")].role
    await cluster.switch("d0", "encoder")
    await cluster.handed_over("r")
    await until(lambda: not decode._tasks and decode._batch.is_empty() and not decode._loop.is_stepping, "it has left")
    assert not decode.is_idle()
    await cluster.go_on("d1", *begun)
    await until(lambda: len(cluster.hosts[InstanceId("d0")]._roles.all()) == 1, "the role has ended")
    await output_of(cluster, *begun)
    await cluster.stop()


async def test_to_hand_over_to_nobody_is_not_remembered() -> None:
    cluster = await start(1)
    begun = await begin(cluster, "r", 200)
    await cluster.hand_over("d0")
    await cluster.start("d1", ["decode"], FakeEngine(200))
    assert await output_of(cluster, *begun) == expected_tokens(PROMPT, 0, 200)
    assert cluster.stream("r").num_moves == 0
    await cluster.stop()


async def test_what_is_bound_to_its_instance_ends_there() -> None:
    """As on a coupled server that is drained: elsewhere it would be computed again."""
    cluster = FakeCluster(policy="monolith")
    for name in ("m0", "m1"):
        await cluster.start(name, ["prefill", "decode"], FakeEngine(200))
    request = text_request("r", PROMPT, 200)
    reply = await cluster.prefill("m0", request)
    await cluster.decode("m0", request, reply)
    cluster.hosts[InstanceId("m0")]._roles.close_intakes()
    assert await output_of(cluster, request, reply) == expected_tokens(PROMPT, 0, 200)
    assert cluster.stream("r").num_moves == 0
    await cluster.stop()


async def test_a_long_output_comes_by_the_transport() -> None:
    cluster = await start()
    begun = await begin(cluster, "r", 200)
    await cluster.hand_over("d0")
    await cluster.handed_over("r")
    await cluster.go_on("d1", *begun, is_long=True)
    assert await output_of(cluster, *begun) == expected_tokens(PROMPT, 0, 200)
    await cluster.stop()
