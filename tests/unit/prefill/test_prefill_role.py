"""The prefill role: chunks, admission, embeddings, leases, cancellation, faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.fake_cluster import FakeCluster, FakeHost, error_of, image_request, prompt_of, text_request, until
from support.fake_engine import FakeEngine, embedding_of, expected_tokens
from triptych.shared.engine.role import MAX_PULLS
from triptych.shared.messages import PrefillRequest, PromptTokens, RequestId, TensorRef


async def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("p", ["prefill"], engine)


def with_fields(request: PrefillRequest, **fields: Any) -> PrefillRequest:
    return PrefillRequest(**({name: getattr(request, name) for name in PrefillRequest.__struct_fields__} | fields))


async def embeddings(cluster: FakeCluster, name: str, value: float, num_tokens: int, request_id: str) -> TensorRef:
    tensor = torch.full((num_tokens, 2), value)
    return await cluster.hosts[name].transport.put(tensor, RequestId(request_id), 60.0)  # type: ignore[index]


async def test_the_first_token_and_the_lease() -> None:
    cluster, host = await start()
    reply = await cluster.prefill("p", text_request("r", [1, 2, 3, 4, 5]))
    assert [reply.first_token] == expected_tokens([1, 2, 3, 4, 5], 0, 1)
    assert reply.kv is not None
    assert (reply.kv.num_computed_tokens, reply.kv.block_size, reply.kv.layout) == (5, 4, "fake")
    assert (host.pool.num_leased, host.pool.num_used) == (2, 0)
    assert not host.is_idle()
    await cluster.release("r")
    await cluster.stop()


@pytest.mark.parametrize("num_output", [1, 6])
async def test_output_that_was_made_elsewhere_is_a_part_of_the_prompt(num_output: int) -> None:
    """It counts for what is left to generate, and its KV goes on as that of a whole request."""
    cluster, _ = await start()
    prompt = [1, 2, 3, 4, 5]
    whole = expected_tokens(prompt, 0, 9)
    request = with_fields(text_request("r", [*prompt, *whole[:num_output]], 9), num_output_tokens=num_output)
    reply = await cluster.prefill("p", request)
    assert reply.first_token == whole[num_output]
    assert reply.kv is not None
    assert reply.kv.num_computed_tokens == 5 + num_output
    last = with_fields(text_request("last", [*prompt, *whole[:8]], 9), num_output_tokens=8)
    reply = await cluster.prefill("p", last)
    assert (reply.first_token, reply.finish_reason, reply.kv) == (whole[8], "length", None)
    for wrong in (9, 14):
        refused = with_fields(text_request("wrong", [*prompt, *whole], 9), num_output_tokens=wrong)
        assert (await error_of(cluster.prefill("p", refused))).code == "invalid_message"
    for request_id in ("r", "last"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_prompts_are_cut_in_chunks_that_several_share() -> None:
    cluster, host = await start(max_prefill_tokens=8, policy="static")
    prompts = {"a": list(range(13)), "b": [1, 2], "c": list(range(20))}
    host.engine.gate.clear()
    tasks = [asyncio.create_task(cluster.prefill("p", text_request(id, p))) for id, p in prompts.items()]
    await until(host.engine.is_inside.is_set, "a step runs")
    await until(lambda: host.role.load().num_waiting + host.role.load().num_running == 3, "all are here")
    host.engine.gate.set()
    for (id, prompt), reply in zip(prompts.items(), await asyncio.gather(*tasks), strict=True):
        assert [reply.first_token] == expected_tokens(prompt, 0, 1)
        await cluster.release(id)
    assert all(sum(size for _, size in step) <= 8 for step in host.engine.steps)
    assert [("a", 5), ("b", 2), ("c", 1)] in host.engine.steps
    assert sum(size for step in host.engine.steps for _, size in step) == 13 + 2 + 20
    await cluster.stop()


@pytest.mark.parametrize(("max_tokens", "stops", "reason"), [(1, (), "length"), (8, "first", "stop")])
async def test_a_first_token_that_is_the_last_leaves_no_lease(max_tokens: int, stops: Any, reason: str) -> None:
    cluster, host = await start()
    stop_token_ids = tuple(expected_tokens([1, 2], 0, 1)) if stops else ()
    reply = await cluster.prefill("p", text_request("r", [1, 2], max_tokens, stop_token_ids=stop_token_ids))
    assert (reply.finish_reason, reply.kv) == (reason, None)
    assert host.pool.num_free == host.pool.num_blocks
    await cluster.stop()


async def test_embeddings_of_a_peer_and_of_our_own() -> None:
    cluster, host = await start()
    encoder = await cluster.start("e", ["encoder"])
    pixels = await cluster.put_pixels("e", 9, "r")
    encoded = await cluster.encode("e", "r", pixels)
    own = await embeddings(cluster, "p", 77.0, 2, "r")
    prompt = [1, 2, 3, 0, 0, 0, 4, 0, 0, 5]
    reply = await cluster.prefill("p", image_request("r", prompt, {3: encoded.embeddings, 7: own}))
    value = embedding_of(torch.full((4, 4, 3), 9))
    slots = [1, 2, 3, value, value, value, 4, 77, 77, 5]
    assert [reply.first_token] == expected_tokens(slots, 2, 1)
    assert reply.kv is not None
    assert reply.kv.position_delta == 14
    assert host.transport.usage()[2] == 1, "only the KV is leased"
    await cluster.until_at_rest("e")
    assert encoder.engine.encodes == [1]
    await cluster.release("r")
    await cluster.stop()


async def test_many_images_are_pulled_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport refuses more pulls than it has a bound for, and what was pulled before is gone from its owner."""
    monkeypatch.setattr("triptych.shared.transport.transport.MAX_PULLS_UNDER_WAY", MAX_PULLS)
    cluster, _ = await start()
    await cluster.start("e", ["encoder"])
    refs = {2 * i: await embeddings(cluster, "e", float(i), 2, "r") for i in range(3 * MAX_PULLS)}
    reply = await cluster.prefill("p", image_request("r", [0] * 2 * len(refs), refs))
    slots = [i for i in range(len(refs)) for _ in range(2)]
    assert [reply.first_token] == expected_tokens(slots, len(refs), 1)
    await cluster.release("r")
    await cluster.stop()


async def test_a_leased_prompt() -> None:
    cluster, _ = await start(max_prefill_tokens=4096)
    await cluster.start("e", ["encoder"])
    ids = list(range(100))
    data = torch.frombuffer(bytearray(prompt_of(ids).inline), dtype=torch.uint8)
    ref = await cluster.hosts["e"].transport.put(data, RequestId("r"), 60.0)  # type: ignore[index]
    request = with_fields(text_request("r", [1]), prompt=PromptTokens(100, leased=ref))
    reply = await cluster.prefill("p", request)
    assert [reply.first_token] == expected_tokens(ids, 0, 1)
    await cluster.release("r")
    await cluster.stop()


async def test_admission_waits_for_blocks_and_keeps_the_order() -> None:
    """The second prompt needs more than is free; the third would fit, and still waits its turn, first come, first served."""
    cluster, host = await start(FakeEngine(8), policy="elasticmm")
    await cluster.prefill("p", text_request("a", [1] * 20))
    second = asyncio.create_task(cluster.prefill("p", text_request("b", [2] * 16)))
    third = asyncio.create_task(cluster.prefill("p", text_request("c", [3])))
    await until(lambda: host.role.load().num_waiting == 2, "both wait")
    assert host.pool.num_free == 3
    await cluster.release("a")
    assert [(await second).first_token, (await third).first_token] == [
        *expected_tokens([2] * 16, 0, 1),
        *expected_tokens([3], 0, 1),
    ]
    for id in ("b", "c"):
        await cluster.release(id)
    await cluster.stop()


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        ({"prompt": prompt_of([1] * 40)}, "bad_request", "context_length_exceeded"),
        ({"prompt": prompt_of([])}, "internal", "invalid_message"),
        ({"prompt": PromptTokens(3, b"12345678")}, "internal", "invalid_message"),
    ],
)
async def test_prompts_that_can_never_work_are_refused(change: dict[str, Any], kind: str, code: str) -> None:
    """A client is only blamed for what it can change."""
    cluster, _ = await start(FakeEngine(10))
    error = await error_of(cluster.prefill("p", with_fields(text_request("r", [1]), **change)))
    assert (error.kind, error.code) == (kind, code)
    await cluster.stop()


async def test_a_prompt_whose_kv_could_never_be_pulled_is_refused() -> None:
    """The store takes 64 KB, a block of four tokens 64 bytes: the KV of 4092 tokens."""
    cluster, host = await start(FakeEngine(2000), tensor_store_bytes=1 << 16)
    card = host.report().model
    assert card is not None
    assert card.max_model_len == 4 * ((1 << 16) // 64 - 1)
    decode = await cluster.start("d", ["decode"], FakeEngine(2000))
    longest = text_request("r", [7] * (card.max_model_len - 2), max_tokens=2)
    assert len(await cluster.generate("p", "d", longest)) == 2
    error = await error_of(cluster.prefill("p", text_request("s", [7] * card.max_model_len)))
    assert (error.kind, error.code) == ("bad_request", "context_length_exceeded")
    assert decode.report().model == card
    await cluster.stop()


@pytest.mark.parametrize("offsets", [(2, 3), (5, 2), (2, 8), (-1, 4)])
async def test_images_out_of_place_are_refused(offsets: tuple[int, int]) -> None:
    """Ten tokens, two images of three."""
    cluster, host = await start()
    refs = [await embeddings(cluster, "p", 1.0, 3, "r") for _ in offsets]
    request = image_request("r", [0] * 10, dict(zip(offsets, refs, strict=True)))
    error = await error_of(cluster.prefill("p", request))
    assert (error.kind, error.code) == ("internal", "invalid_message")
    assert not host.engine.steps
    await cluster.release("r")
    await cluster.stop()


async def test_lost_embeddings_are_told_as_instance_lost() -> None:
    cluster, host = await start()
    own = await embeddings(cluster, "p", 1.0, 3, "r")
    host.transport.release(own.tensor_id)
    error = await error_of(cluster.prefill("p", image_request("r", [0] * 5, {1: own})))
    assert (error.kind, error.code) == ("instance_lost", "tensor_gone")
    await cluster.stop()


async def test_a_poison_prompt_fails_alone() -> None:
    engine = FakeEngine()
    engine.poison = {666}
    cluster, _ = await start(engine)
    prompts = {"a": [1, 2], "bad": [1, 666, 3], "b": [4]}
    results = await asyncio.gather(
        *(cluster.prefill("p", text_request(id, p)) for id, p in prompts.items()), return_exceptions=True
    )
    assert [getattr(result, "code", None) for result in results] == [None, "internal", None]
    for id in prompts:
        await cluster.release(id)
    await cluster.stop()


async def test_a_bug_in_a_step_ends_its_requests_and_the_role_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, host = await start()

    def broken(batch: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(host.role._batch, "_compute", broken)
        assert (await error_of(cluster.prefill("p", text_request("r", [1])))).code == "internal"
    assert (await cluster.prefill("p", text_request("next", [5], 1))).first_token == expected_tokens([5], 0, 1)[0]
    await cluster.stop()


async def test_release_in_a_step_frees_after_it() -> None:
    cluster, host = await start()
    host.engine.gate.clear()
    task = asyncio.create_task(error_of(cluster.prefill("p", text_request("r", [1] * 9))))
    await until(host.engine.is_inside.is_set, "a step runs")
    await cluster.release("r")
    assert (await task).code == "request_released"
    assert host.pool.num_used == 3
    assert not host.is_idle()
    host.engine.gate.set()
    await cluster.stop()


async def test_the_deadline_of_a_waiting_prompt() -> None:
    cluster, _ = await start(FakeEngine(8))
    await cluster.prefill("p", text_request("a", [1] * 20))
    error = await error_of(cluster.prefill("p", text_request("b", [2] * 20, timeout_s=0.02)))
    assert (error.kind, error.code, error.status) == ("overloaded", "timeout", 504)
    await cluster.release("a")
    await cluster.stop()


async def test_leases_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that vanishes without a word: nobody pulls, nobody releases."""
    monkeypatch.setattr("triptych.services.prefill.role.LEASE_GRACE_S", 0.0)
    cluster, _ = await start()
    await cluster.prefill("p", text_request("a", [1] * 20, timeout_s=0.2))
    await cluster.stop()


async def test_waiting_prompts_are_bounded() -> None:
    cluster, host = await start(FakeEngine(8), max_waiting=1)
    await cluster.prefill("p", text_request("a", [1] * 20))
    waiting = asyncio.create_task(cluster.prefill("p", text_request("b", [2] * 20)))
    await until(lambda: host.role.load().num_waiting == 1, "one waits")
    assert (await error_of(cluster.prefill("p", text_request("c", [3])))).code == "overloaded"
    await cluster.release("a")
    await waiting
    await cluster.release("b")
    await cluster.stop()


async def test_work_of_a_role_that_is_not_here_is_refused() -> None:
    cluster, _ = await start()
    pixels = await cluster.put_pixels("p", 1, "r")
    assert (await error_of(cluster.encode("p", "r", pixels))).code == "stage_unavailable"
    await cluster.release("r")
    await cluster.stop()


async def test_blocks_that_nobody_owns_are_noticed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.services.instance.HOUSEKEEPING_S", 0.005)
    cluster, host = await start()
    lost = host.pool.allocate(2)
    await cluster.prefill("p", text_request("r", [1], 1))
    metrics = host._context.metrics
    assert metrics.is_checked.collect()[0].samples[0].value == 0
    await until(lambda: metrics.integrity_failures._value.get() == 1, "the check told of it")
    assert metrics.is_checked.collect()[0].samples[0].value == 1
    host.pool.free(lost)
    await cluster.stop(is_clean=False)
