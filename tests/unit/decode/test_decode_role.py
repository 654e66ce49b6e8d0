"""The decode role: joining, tokens on the stream, preemption, taking over, cancellation, faults."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from support.fake_cluster import ROUTER, FakeCluster, FakeHost, error_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.services.decode import role as decode_role
from triptych.services.decode.job import DecodeJob
from triptych.services.decode.preempted import held_bytes_of
from triptych.shared.errors import TriptychError
from triptych.shared.messages import (
    InstanceId,
    KvRef,
    Lost,
    PrefillReply,
    PrefillRequest,
    ReleaseRequest,
    RequestId,
    stream_subject,
)

Started = tuple[FakeCluster, FakeHost, FakeHost]


async def start(prefill: FakeEngine | None = None, decode: FakeEngine | None = None, **settings: Any) -> Started:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("p", ["prefill"], prefill), await cluster.start("d", ["decode"], decode)


def changed(reply: PrefillReply, **fields: Any) -> PrefillReply:
    assert reply.kv is not None
    kv = {name: getattr(reply.kv, name) for name in KvRef.__struct_fields__} | fields
    return PrefillReply(reply.first_token, reply.time, kv=KvRef(**kv))


async def test_tokens_equal_a_direct_run_across_instances() -> None:
    cluster, _, decode = await start()
    prompts = {f"r{i}": list(range(10 * i, 10 * i + 3 + 5 * i)) for i in range(5)}
    outputs = await asyncio.gather(*(cluster.generate("p", "d", text_request(id, prompt)) for id, prompt in prompts.items()))
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 8)
    last = cluster.stream("r1").last
    assert last is not None
    assert last.time is not None
    assert (last.finish_reason, last.time.stage, last.time.instance_id) == ("length", "decode", "d")
    assert decode.role.num_preemptions == 0
    await cluster.stop()


async def test_tokens_are_the_same_when_most_outputs_make_way() -> None:
    """With a target that none can meet, one goes at a time once a step was measured; preempted ones among them."""
    cluster, _, decode = await start(FakeEngine(64), FakeEngine(16), slo_tbt_s=1e-6)
    prompts = {f"r{i}": [i, 2 * i, 3 * i, 7, 8] for i in range(6)}
    outputs = await asyncio.gather(*(cluster.generate("p", "d", text_request(id, p, 35)) for id, p in prompts.items()))
    assert outputs == [expected_tokens(prompt, 0, 35) for prompt in prompts.values()]
    assert sum(len(step) == 1 for step in decode.engine.steps) >= 33 * len(prompts)
    await cluster.stop()


async def test_running_requests_share_a_step_and_the_batch_is_bounded() -> None:
    cluster, _, decode = await start(max_num_seqs=3)
    requests = [text_request(f"r{i}", [i, i + 1], 20) for i in range(5)]
    decode.engine.gate.clear()
    outputs = [asyncio.create_task(cluster.generate("p", "d", request)) for request in requests]
    await until(lambda: decode.role.load().num_waiting + decode.role.load().num_running == 5, "all are accepted")
    decode.engine.gate.set()
    await asyncio.gather(*outputs)
    assert max(len(step) for step in decode.engine.steps) == 3
    assert len(decode.engine.steps) < 5 * 19
    await cluster.stop()


async def test_a_stop_token_ends_the_output_and_is_not_shown() -> None:
    prompt = [1, 2, 3]
    whole = expected_tokens(prompt, 0, 8)
    cluster, _, _ = await start()
    output = await cluster.generate("p", "d", text_request("r", prompt, stop_token_ids=(whole[4],)))
    assert output == whole[:4]
    last = cluster.stream("r").last
    assert last is not None
    assert last.finish_reason == "stop"
    await cluster.stop()


async def test_the_model_length_ends_the_output() -> None:
    prompt = [1, 2, 3]
    cluster, _, _ = await start(FakeEngine(max_model_len=9), FakeEngine(max_model_len=9))
    output = await cluster.generate("p", "d", text_request("r", prompt, max_tokens=100))
    assert output == expected_tokens(prompt, 0, 6)
    await cluster.stop()


async def test_preemption_is_token_exact() -> None:
    """Six sequences of up to 10 blocks in a pool of 16."""
    cluster, _, decode = await start(FakeEngine(64), FakeEngine(16))
    prompts = {f"r{i}": [i, 2 * i, 3 * i, 7, 8] for i in range(6)}
    outputs = await asyncio.gather(*(cluster.generate("p", "d", text_request(id, p, 35)) for id, p in prompts.items()))
    assert decode.role.num_preemptions > 0
    assert decode.engine.num_exports > 0
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 35)
    await cluster.stop()


@pytest.mark.parametrize("is_colocated", [False, True])
async def test_no_request_ends_for_a_lack_of_host_memory(is_colocated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that begin small side by side and each grow to nearly the whole pool: more is preempted at once than the
    pool holds. In one pool with prefill, new prompts come all the while and must not take the preempted ones' place."""
    cluster = FakeCluster(max_num_seqs=8, max_prefill_tokens=8)
    if not is_colocated:
        await cluster.start("p", ["prefill"], FakeEngine(200))
    decode = await cluster.start("d", ["prefill", "decode"] if is_colocated else ["decode"], FakeEngine(40))
    batch = decode._roles.get("decode")._batch  # type: ignore[attr-defined]
    held_bytes: list[int] = []
    preempt = batch._preempt

    async def counted(job: DecodeJob) -> None:
        await preempt(job)
        held_bytes.append(held_bytes_of([one for one in batch._waiting if one.is_preempted]))

    monkeypatch.setattr(batch, "_preempt", counted)
    prompts = {f"r{i}": [i, 2, 3] for i in range(16)}
    requests = [text_request(id, prompt, 140) for id, prompt in prompts.items()]
    outputs = await asyncio.gather(*(cluster.generate("d" if is_colocated else "p", "d", request) for request in requests))
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 140)
    pool_bytes = decode._context.kv.num_total * decode.engine._kv[:, :, 0].nbytes
    assert pool_bytes < max(held_bytes) <= batch._preempted_kv.max_bytes < 4 * pool_bytes
    await cluster.stop()


async def test_preempted_requests_are_bounded_by_host_memory() -> None:
    cluster, _, decode = await start(FakeEngine(64), FakeEngine(16))
    decode.role._batch._preempted_kv.max_bytes = 0
    replies = await asyncio.gather(
        *(cluster.generate("p", "d", text_request(f"r{i}", [i, 5, 6, 7, 8], 35)) for i in range(6)), return_exceptions=True
    )
    assert any(isinstance(reply, TriptychError) for reply in replies)
    assert {cluster.stream(f"r{i}").error_code for i in range(6)} == {None, "kv_full"}
    assert isinstance(replies[0], list)
    await cluster.stop()


async def test_own_blocks_are_taken_over_without_a_copy() -> None:
    cluster = FakeCluster()
    host = await cluster.start("pd", ["prefill", "decode"])
    output = await cluster.generate("pd", "pd", text_request("r", [1, 2, 3, 4, 5]))
    assert output == expected_tokens([1, 2, 3, 4, 5], 0, 8)
    assert host.engine.num_exports == 0
    await cluster.stop()


async def test_prefill_and_decode_in_one_small_pool_all_finish() -> None:
    """Preempted sequences, leases and new prompts compete for 20 blocks; 12 requests need up to 12 each."""
    cluster = FakeCluster(max_prefill_tokens=8)
    await cluster.start("pd", ["prefill", "decode"], FakeEngine(20))
    prompts = {f"r{i}": [i] * (4 + i) for i in range(12)}
    outputs = await asyncio.gather(*(cluster.generate("pd", "pd", text_request(id, p, 32)) for id, p in prompts.items()))
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 32)
    await cluster.stop()


@pytest.mark.parametrize(
    "fields", [{"layout": "other"}, {"block_size": 8}, {"num_computed_tokens": 2}, {"num_computed_tokens": 9}]
)
async def test_kv_of_another_kind_is_refused(fields: dict[str, Any]) -> None:
    cluster, _, _ = await start()
    request = text_request("r", [1, 2, 3])
    reply = await cluster.prefill("p", request)
    error = await error_of(cluster.decode("d", request, changed(reply, **fields)))
    assert (error.kind, error.code) == ("internal", "kv_layout")
    await cluster.release("r")
    await cluster.stop()


async def test_a_lost_owner_is_told_as_instance_lost() -> None:
    cluster, prefill, _ = await start()
    request = text_request("r", [1, 2, 3])
    reply = await cluster.prefill("p", request)
    await prefill.stop()
    del cluster.hosts[InstanceId("p")]
    del cluster.bus.hosts[InstanceId("p")]
    await cluster.decode("d", request, reply)
    stream = await cluster.finished("r")
    assert stream.last is not None
    assert stream.last.error is not None
    assert stream.last.error.kind == "instance_lost"
    await cluster.stop()


async def test_an_owner_that_has_ended_is_told_as_instance_lost() -> None:
    cluster, _, _ = await start()
    request = text_request("r", [1, 2, 3])
    reply = await cluster.prefill("p", request)
    assert reply.kv is not None
    cluster.registry.on_event(Lost(InstanceId("nobody"), "nobody", 1, expected=False), time.monotonic())
    tensor = {name: getattr(reply.kv.tensor, name) for name in reply.kv.tensor.__struct_fields__} | {"owner": "nobody"}
    await cluster.decode("d", request, changed(reply, tensor=type(reply.kv.tensor)(**tensor)))
    stream = await cluster.finished("r")
    assert stream.error_code == "instance_lost"
    await cluster.release("r")
    await cluster.stop()


async def test_a_poison_sequence_fails_alone() -> None:
    prompts = {f"r{i}": [i, 2, 3] for i in range(4)}
    decode = FakeEngine()
    decode.poison = {expected_tokens(prompts["r2"], 0, 4)[3]}
    cluster, _, _ = await start(decode=decode)
    results = await asyncio.gather(
        *(cluster.generate("p", "d", text_request(id, p)) for id, p in prompts.items()), return_exceptions=True
    )
    for id, result in zip(prompts, results, strict=True):
        if id == "r2":
            assert cluster.stream(id).error_code == "internal"
        else:
            assert result == expected_tokens(prompts[id], 0, 8)
    assert await cluster.generate("p", "d", text_request("next", [5])) == expected_tokens([5], 0, 8)
    await cluster.stop()


async def test_a_bug_in_a_step_ends_its_requests_and_the_role_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, decode = await start()

    def broken(batch: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(decode.role._batch, "_compute", broken)
        request = text_request("r", [1])
        await cluster.decode("d", request, await cluster.prefill("p", request))
        assert (await cluster.finished("r")).error_code == "internal"
    assert await cluster.generate("p", "d", text_request("next", [5])) == expected_tokens([5], 0, 8)
    await cluster.stop()


@pytest.mark.parametrize("num_steps_before", [0, 3])
async def test_release_while_in_a_step_frees_after_it(num_steps_before: int) -> None:
    cluster, _, decode = await start()
    request = text_request("r", [1, 2, 3], 10_000)
    reply = await cluster.prefill("p", request)
    await cluster.decode("d", request, reply)
    await until(lambda: len(decode.engine.steps) >= num_steps_before, "some steps")
    decode.engine.is_inside.clear()
    decode.engine.gate.clear()
    await until(decode.engine.is_inside.is_set, "a step runs")
    await cluster.release("r")
    await until(lambda: not decode.role._jobs, "the job is gone")
    assert decode.pool.num_used > 0, "the engine may still write there"
    decode.engine.gate.set()
    await cluster.until_at_rest("d")
    assert cluster.stream("r").last is None
    await cluster.stop()


async def test_release_while_waiting_for_a_place() -> None:
    cluster, _, decode = await start(max_num_seqs=1)
    first, second = text_request("a", [1], 200), text_request("b", [2], 200)
    decode.engine.gate.clear()
    for request in (first, second):
        await cluster.decode("d", request, await cluster.prefill("p", request))
    await until(lambda: len(decode.role._batch._waiting) == 1, "one waits")
    await cluster.release("b")
    await until(lambda: decode.role.load().num_waiting == 0, "it is gone")
    decode.engine.gate.set()
    assert (await cluster.finished("a")).last is not None
    await cluster.stop()


async def test_release_of_a_preempted_request() -> None:
    cluster, _, decode = await start(FakeEngine(64), FakeEngine(8))
    for id in ("a", "b"):
        request = text_request(id, [1, 2, 3], 29)
        await cluster.decode("d", request, await cluster.prefill("p", request))
    await until(lambda: decode.role.num_preemptions > 0, "b is preempted")
    await cluster.release("b")
    stream = await cluster.finished("a")
    assert stream.token_ids == expected_tokens([1, 2, 3], 0, 29)[1:]
    await cluster.stop()


async def test_release_that_overtakes_its_request() -> None:
    cluster, _, _ = await start()
    request = text_request("r", [1, 2, 3])
    reply = await cluster.prefill("p", request)
    await cluster.release("r")
    error = await error_of(cluster.decode("d", request, reply))
    assert error.code == "request_released"
    await cluster.stop()


async def test_the_deadline_ends_a_running_request() -> None:
    cluster, _, decode = await start()
    decode.engine.step_time_s = 0.002
    request = text_request("r", [1, 2, 3], 100_000)
    await cluster.decode("d", request, await cluster.prefill("p", request), timeout_s=0.05)
    assert (await cluster.finished("r")).error_code == "timeout"
    await cluster.stop()


async def test_a_lost_router_frees_its_requests_only() -> None:
    cluster, prefill, decode = await start()
    other = InstanceId("router-1-test")
    decode.engine.step_time_s = 0.001
    mine, theirs = text_request("a", [1, 2, 3], 100), text_request("b", [4], 100_000, router_id=other)
    leased = text_request("c", [4], 100, router_id=other)
    for request in (mine, theirs):
        await cluster.decode("d", request, await cluster.prefill("p", request))
    await cluster.prefill("p", leased)
    for host in (prefill, decode):
        host.on_router_lost(other)
    await cluster.until_at_rest("p")
    assert (await cluster.finished("a")).token_ids == expected_tokens([1, 2, 3], 0, 100)[1:]
    await cluster.stop()


async def test_requests_that_come_after_the_end_of_their_router_are_refused() -> None:
    """They were on their way when it died: nobody would ever release what they get."""
    cluster, _, _ = await start()
    dead = InstanceId("router-1-test")
    before, after = text_request("a", [1, 2, 3], 100, router_id=dead), text_request("b", [4, 5], 100, router_id=dead)
    reply = await cluster.prefill("p", before)
    cluster.registry.on_event(Lost(dead, "router-1", -9, expected=False), 0.0)
    for late in (cluster.prefill("p", after), cluster.decode("d", before, reply)):
        assert (await error_of(late)).code == "request_released"
    await cluster.release("a")  # as on_router_lost does
    assert await cluster.generate("p", "d", text_request("c", [5])) == expected_tokens([5], 0, 8)
    await cluster.stop()


async def test_waiting_requests_are_bounded() -> None:
    cluster, _, decode = await start(max_waiting=2, max_num_seqs=1)
    decode.engine.gate.clear()
    requests = [text_request(f"r{i}", [i + 1]) for i in range(4)]
    replies = [await cluster.prefill("p", request) for request in requests]
    for request, reply in zip(requests[:2], replies, strict=False):
        await cluster.decode("d", request, reply)
    await until(lambda: decode.role.load().num_running == 1, "one runs")
    await cluster.decode("d", requests[2], replies[2])
    error = await error_of(cluster.decode("d", requests[3], replies[3]))
    assert (error.kind, error.code) == ("overloaded", "overloaded")
    decode.engine.gate.set()
    await cluster.finished("r2")
    await cluster.release("r3")
    await cluster.stop()


async def test_signs_of_life_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_role, "SIGN_CHECK_S", 0.005)
    monkeypatch.setattr(decode_role, "SIGN_OF_LIFE_S", 0.01)
    cluster, _, decode = await start()
    decode.engine.gate.clear()
    request = text_request("r", [1, 2, 3])
    await cluster.decode("d", request, await cluster.prefill("p", request))
    await until(lambda: cluster.stream("r").num_signs >= 2, "two signs")
    decode.engine.gate.set()
    assert (await cluster.finished("r")).token_ids == expected_tokens([1, 2, 3], 0, 8)[1:]
    await cluster.stop()


async def test_draining_goes_on_until_the_last_token() -> None:
    cluster, _, decode = await start()
    decode.engine.gate.clear()
    request, late = text_request("r", [1, 2, 3]), text_request("late", [1])
    await cluster.decode("d", request, await cluster.prefill("p", request))
    decode._frame.lifecycle.begin_drain(exit=False)
    error = await error_of(cluster.decode("d", late, await cluster.prefill("p", late)))
    assert error.code == "stage_unavailable"
    assert not decode.is_idle()
    decode.engine.gate.set()
    assert (await cluster.finished("r")).token_ids == expected_tokens([1, 2, 3], 0, 8)[1:]
    await cluster.release("late")
    await cluster.stop()


async def test_random_releases_leak_nothing() -> None:
    """200 requests over a small pool, each released after another number of loop turns."""
    cluster, _, _ = await start(FakeEngine(24), FakeEngine(20), max_num_seqs=6, max_prefill_tokens=6)
    turns = itertools.cycle([1, 3, 10, 30, 60, 100, 200, None])

    async def one(request: PrefillRequest, num_turns: int | None) -> None:
        task = asyncio.create_task(cluster.generate("p", "d", request))
        if num_turns is not None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if num_turns is None:
            assert result == expected_tokens([request.prompt.num_tokens] * request.prompt.num_tokens, 0, 12)
        await cluster.release(request.request_id)

    for batch in range(10):
        requests = [text_request(f"r{batch}-{i}", [1 + i % 17] * (1 + i % 17), 12) for i in range(20)]
        await asyncio.gather(*(one(request, next(turns)) for request in requests))
    await cluster.stop()


@pytest.mark.parametrize("num_tokens", [2, 17, 40])
async def test_an_output_that_is_wanted_whole_comes_in_few_chunks(num_tokens: int) -> None:
    cluster, _, _ = await start(stream_interval_s=0)
    request = text_request("r", [1, 2, 3], num_tokens)
    await cluster.decode("d", request, await cluster.prefill("p", request), whole=True)
    assert (await cluster.finished("r")).token_ids == expected_tokens([1, 2, 3], 0, num_tokens)[1:]
    sizes = [len(chunk.token_ids) for batch in cluster.bus.events[stream_subject(ROUTER)] for chunk in batch.chunks]  # type: ignore[union-attr]
    assert len(sizes) == -(-(num_tokens - 1) // decode_role.WHOLE_CHUNK_TOKENS)
    await cluster.stop()


async def test_a_release_of_nothing_is_nothing() -> None:
    cluster, prefill, _ = await start()
    await prefill.handle(ReleaseRequest(RequestId("never heard of")))
    assert await cluster.generate("p", "d", text_request("r", [3])) == expected_tokens([3], 0, 8)
    assert ROUTER not in cluster.hosts
    await cluster.stop()


async def test_a_role_that_stops_leaves_nothing_at_the_instance() -> None:
    """The instance lives on, with other roles."""
    cluster, _, decode = await start()
    request = text_request("r", [1, 2, 3], 10_000)
    await cluster.decode("d", request, await cluster.prefill("p", request))
    await until(lambda: decode._context.kv.num_claimed > 0, "it claims blocks")
    await decode._roles.switch((), 0.0)
    await until(lambda: not decode._context.kv._on_freed, "the role has ended")
    assert (await cluster.finished("r")).error_code == "given_up"
    assert decode._context.kv.num_claimed == 0
    await until(lambda: decode.pool.num_free + decode.pool.num_cached == decode.pool.num_blocks, "its blocks are free")
    await cluster.release("r")
    await cluster.stop()
