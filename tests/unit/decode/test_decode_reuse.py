"""The decode role and the prefix cache: what an answer leaves for the next turn, sequences that share blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fake_cluster import FakeCluster, error_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.cache.block_keys import BlockChain
from triptych.services.decode import preempted
from triptych.services.decode.job import DecodeJob
from triptych.shared.messages import InstanceId, KvRef, PrefillReply, PrefillRequest, PrefixSource

PROMPT = list(range(1, 22))


def with_prefix(request: PrefillRequest, name: str, num_blocks: int) -> PrefillRequest:
    fields = {field: getattr(request, field) for field in PrefillRequest.__struct_fields__}
    return PrefillRequest(**(fields | {"prefix": PrefixSource(InstanceId(name), num_blocks)}))


async def test_the_next_turn_finds_the_answer_of_the_last() -> None:
    cluster = FakeCluster()
    prefill, decode = await cluster.start("p", ["prefill"]), await cluster.start("d", ["decode"])
    answer = await cluster.generate("p", "d", text_request("a", PROMPT))
    turn = [*PROMPT, *answer, 50, 51, 52, 53]
    chain = decode._context.prefixes.chain_of(turn, [], b"")
    assert chain is not None
    found = await decode._context.index.lookup(chain.keys, [])
    assert dict(found.prefixes) == {"d": 7}, "prompt and answer, but for its last token, have 28 tokens"
    reply = await cluster.prefill("p", with_prefix(text_request("b", turn), "d", 7))
    assert (reply.first_token, reply.num_cached_tokens) == (expected_tokens(turn, 0, 1)[0], 28)
    assert prefill.engine.steps[-1] == [("b", len(turn) - 28)]
    for request_id in ("a", "b"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_the_next_turn_on_one_instance_copies_nothing() -> None:
    cluster = FakeCluster()
    host = await cluster.start("pd", ["prefill", "decode"])
    answer = await cluster.generate("pd", "pd", text_request("a", PROMPT))
    turn = [*PROMPT, *answer, 50]
    assert await cluster.generate("pd", "pd", text_request("b", turn)) == expected_tokens(turn, 0, 8)
    assert next(size for step in host.engine.steps for id, size in step if id == "b") == len(turn) - 28
    assert host.engine.num_exports == 0
    await cluster.stop()


async def test_an_answer_that_comes_again_takes_no_blocks_of_its_own() -> None:
    cluster = FakeCluster()
    await cluster.start("p", ["prefill"])
    decode = await cluster.start("d", ["decode"])
    for request_id in ("a", "b", "c"):
        await cluster.generate("p", "d", text_request(request_id, PROMPT))
        await cluster.release(request_id)
    await cluster.until_at_rest("d")
    assert decode.pool.num_cached == 7
    await cluster.stop()


async def test_an_answer_that_ends_early_is_kept_as_well() -> None:
    """It is stopped while it runs alone: what it has by then is there for the next one."""
    cluster = FakeCluster()
    decode = await cluster.start("pd", ["prefill", "decode"])
    expected = expected_tokens(PROMPT, 0, 12)
    stop = text_request("a", PROMPT, 40, stop_token_ids=(expected[-1],))
    assert await cluster.generate("pd", "pd", stop) == expected[:-1]
    await cluster.until_at_rest("pd")
    assert decode.pool.num_cached == (len(PROMPT) + 11) // 4
    await cluster.stop()


@pytest.mark.parametrize(("num_blocks", "num_requests"), [(20, 12), (24, 16)])
async def test_what_preempted_sequences_share_is_copied_once(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_requests: int
) -> None:
    """Ten blocks of prompt are the same for all, eight grow: in the pool no two of them are ever without each other's."""
    held_bytes, num_shared = [], []
    copy = preempted.PreemptedKv.copy

    async def counted(self: Any, job: DecodeJob, others: list[DecodeJob]) -> None:
        await copy(self, job, others)
        held_bytes.append(preempted.held_bytes_of([*others, job]))
        num_shared.append(len(job.shared))

    monkeypatch.setattr(preempted.PreemptedKv, "copy", counted)
    cluster = FakeCluster(max_prefill_tokens=16)
    host = await cluster.start("pd", ["prefill", "decode"], FakeEngine(num_blocks))
    prompts = {f"r{i}": [*range(100, 140), i] for i in range(num_requests)}
    outputs = await asyncio.gather(*(cluster.generate("pd", "pd", text_request(id, p, 30)) for id, p in prompts.items()))
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 30)
    assert max(num_shared) == 10
    assert max(held_bytes) <= 2 * host._context.kv.num_total * host.engine._kv[:, :, 0].nbytes
    await cluster.stop()


async def test_what_only_preempted_sequences_share_is_copied_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with the same eight blocks make way for an older one: the second of them is the last to hold those."""
    num_shared = []
    copy = preempted.PreemptedKv.copy

    async def counted(self: Any, job: DecodeJob, others: list[DecodeJob]) -> None:
        await copy(self, job, others)
        num_shared.append(len(job.shared))

    monkeypatch.setattr(preempted.PreemptedKv, "copy", counted)
    cluster = FakeCluster()
    await cluster.start("pd", ["prefill", "decode"], FakeEngine(25))
    shared = list(range(100, 132))
    prompts = {"old": list(range(1, 22)), "b": [*shared, 1], "c": [*shared, 2]}
    outputs = await asyncio.gather(*(cluster.generate("pd", "pd", text_request(id, p, 60)) for id, p in prompts.items()))
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output == expected_tokens(prompt, 0, 60)
    assert len(num_shared) >= 2, "both were preempted"
    assert set(num_shared) == {8}
    await cluster.stop()


async def test_what_a_sequence_had_when_it_was_cut_off_is_kept() -> None:
    """By its client, in a step: the next turn of somebody who did not wait for the end."""
    cluster = FakeCluster()
    host = await cluster.start("pd", ["prefill", "decode"])
    request = text_request("a", PROMPT, 40)
    reply = await cluster.prefill("pd", request)
    host.engine.step_time_s = 0.01
    await cluster.decode("pd", request, reply)
    await until(lambda: len(cluster.stream("a").token_ids) >= 11, "eleven tokens")
    host.engine.is_inside.clear()
    await until(host.engine.is_inside.is_set, "a step")
    host.engine.gate.clear()
    await cluster.release("a")
    host.engine.gate.set()
    await cluster.until_at_rest("pd")
    assert host.pool.num_cached >= (len(PROMPT) + 11) // 4
    turn = [*PROMPT, *expected_tokens(PROMPT, 0, 12), 50]
    assert await cluster.generate("pd", "pd", text_request("b", turn)) == expected_tokens(turn, 0, 8)
    assert next(size for step in host.engine.steps for id, size in step if id == "b") <= len(turn) - 32
    await cluster.stop()


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"block_keys": b"", "key_tail": b""}, False),
        ({"block_keys": b"123"}, True),
        ({"key_tail": b""}, True),
        ({"key_tail": b"1234" * 4}, True),
    ],
)
async def test_keys_that_were_not_sent_or_are_none(fields: dict[str, bytes], is_refused: bool) -> None:
    cluster = FakeCluster()
    await cluster.start("p", ["prefill"])
    decode = await cluster.start("d", ["decode"])
    request = text_request("r", PROMPT)
    reply = await cluster.prefill("p", request)
    assert reply.kv is not None
    assert BlockChain.resume(reply.kv.block_keys, reply.kv.key_tail, 4).num_tokens == len(PROMPT)
    kv = KvRef(**({name: getattr(reply.kv, name) for name in KvRef.__struct_fields__} | fields))
    changed = PrefillReply(reply.first_token, reply.time, kv=kv)
    if is_refused:
        assert (await error_of(cluster.decode("d", request, changed))).code == "invalid_message"
    else:
        await cluster.decode("d", request, changed)
        assert (await cluster.finished("r")).token_ids == expected_tokens(PROMPT, 0, 8)[1:]
        await cluster.until_at_rest("d")
        assert decode.pool.num_cached == 0
    await cluster.release("r")
    await cluster.stop()
