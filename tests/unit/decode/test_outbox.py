"""The decode outbox: one batch per router and step, each under the bus's limit, in order; a slow bus holds the loop."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_cluster import FakeBus, until
from triptych.services.decode import outbox as outbox_module
from triptych.services.decode.outbox import Outbox, batches, joined
from triptych.shared.errors import InternalError, WireError
from triptych.shared.messages import Event, InstanceId, RequestId, StageTime, TokenBatch, TokenChunk, stream_subject
from triptych.shared.sampling_params import TokenLogprobs
from triptych.shared.wire import MAX_PAYLOAD_BYTES, encode

ME = InstanceId("decode-0-5f3a2c1b")

errors = st.builds(
    WireError, st.just("internal"), st.text(max_size=50), st.text(max_size=500), st.integers(400, 599), st.text(max_size=90)
)
times = st.builds(StageTime, st.just("decode"), st.just(ME), *[st.floats(0, 1e9)] * 3)
chunks = st.builds(
    TokenChunk,
    request_id=st.integers(0, 10**30).map(str).map(RequestId),
    seq=st.integers(0, 1 << 40),
    token_ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=200).map(tuple),
    error=st.none() | errors,
    time=st.none() | times,
)


@given(st.lists(chunks, max_size=5), st.integers(1, 120))
def test_batches_stay_under_the_limit(made: list[TokenChunk], repeat: int) -> None:
    sent = list(batches(ME, made * repeat))
    assert [chunk for batch in sent for chunk in batch.chunks] == made * repeat
    sizes = [len(encode(batch)) for batch in sent]  # raises over the limit
    assert all(size <= MAX_PAYLOAD_BYTES for size in sizes)


@pytest.mark.parametrize(("num_top", "num_steps"), [(None, 20_000), (20, 2000)])
def test_what_waited_for_a_slow_bus_stays_under_the_limit_too(num_top: int | None, num_steps: int) -> None:
    top = tuple((150_000 + i, -20.0 - i) for i in range(num_top or 0))
    logprobs = () if num_top is None else (TokenLogprobs(-1.5, top),)
    steps = [TokenChunk(RequestId("r" * 30), seq, (100_000 + seq,), logprobs) for seq in range(num_steps)]
    sent = list(batches(ME, joined(steps)))
    assert all(len(encode(batch)) <= MAX_PAYLOAD_BYTES for batch in sent)
    next_seq = 0
    for chunk in (chunk for batch in sent for chunk in batch.chunks):
        assert chunk.seq == next_seq
        assert chunk.token_ids == tuple(range(100_000 + next_seq, 100_000 + next_seq + len(chunk.token_ids)))
        assert chunk.logprobs == logprobs * len(chunk.token_ids)
        next_seq += len(chunk.token_ids)
    assert next_seq == num_steps
    assert sum(len(batch.chunks) for batch in sent) < num_steps / 50


async def test_a_step_makes_one_batch_per_router() -> None:
    bus = FakeBus()
    outbox = Outbox(ME, bus.publish_event)
    outbox.start()
    a, b = InstanceId("router-a"), InstanceId("router-b")
    for i in range(3):
        outbox.add(a, TokenChunk(RequestId(f"r{i}"), 1, (i,)))
    outbox.add(b, TokenChunk(RequestId("other"), 1, (9,)))
    await until(outbox.is_empty, "all is sent")
    [batch] = bus.events[stream_subject(a)]
    assert isinstance(batch, TokenBatch)
    assert [chunk.token_ids for chunk in batch.chunks] == [(0,), (1,), (2,)]
    assert len(bus.events[stream_subject(b)]) == 1
    await outbox.stop()


async def test_quick_steps_share_a_batch_until_an_output_ends() -> None:
    bus = FakeBus()
    outbox = Outbox(ME, bus.publish_event, interval_s=60)
    outbox.start()
    router, r, other = InstanceId("router-a"), RequestId("r"), RequestId("other")
    outbox.add(router, TokenChunk(r, 1, (1,)))
    await until(outbox.is_empty, "the first goes out at once")
    for seq in (2, 3, 4):
        outbox.add(router, TokenChunk(r, seq, (seq,)))
        outbox.add(router, TokenChunk(other, seq, (10 * seq,)))
        await asyncio.sleep(0)
    assert len(bus.events[stream_subject(router)]) == 1
    outbox.add(router, TokenChunk(other, 5, (50,), finish_reason="stop"))
    await until(outbox.is_empty, "the end takes along what waits")
    first, second = bus.events[stream_subject(router)]
    assert isinstance(first, TokenBatch)
    assert first.chunks == (TokenChunk(r, 1, (1,)),)
    assert isinstance(second, TokenBatch)
    assert second.chunks == (TokenChunk(r, 2, (2, 3, 4)), TokenChunk(other, 2, (20, 30, 40, 50), finish_reason="stop"))
    await outbox.stop()


async def test_a_slow_bus_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_CHUNKS", 3)
    bus = FakeBus()
    bus.is_open.clear()
    outbox = Outbox(ME, bus.publish_event)
    outbox.start()
    for i in range(3):
        outbox.add(InstanceId("router-a"), TokenChunk(RequestId("r"), i, (i,)))
    await bus.is_blocked.wait()
    waiting = asyncio.create_task(outbox.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    bus.is_open.set()
    await asyncio.wait_for(waiting, 5)
    assert outbox.is_empty()
    await outbox.stop()


async def test_a_batch_that_cannot_be_sent_does_not_end_the_others() -> None:
    bus = FakeBus()

    async def publish(subject: str, event: Event) -> None:
        if subject == stream_subject(InstanceId("router-a")):
            raise InternalError("too large")
        await bus.publish_event(subject, event)

    outbox = Outbox(ME, publish)
    outbox.start()
    for router_id in (InstanceId("router-a"), InstanceId("router-b")):
        outbox.add(router_id, TokenChunk(RequestId("r"), 1, (1,)))
    await until(outbox.is_empty, "nothing waits")
    assert len(bus.events[stream_subject(InstanceId("router-b"))]) == 1
    await outbox.stop()
