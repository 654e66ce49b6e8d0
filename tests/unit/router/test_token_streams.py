"""Token streams: order, gaps, ends, silence, deadlines, and chunks that are not for us."""

from __future__ import annotations

import asyncio

import pytest

from triptych.services.router import token_streams
from triptych.services.router.token_streams import Tokens, TokenStreams
from triptych.shared.errors import BadRequest, DeadlineExceeded, InstanceLost, InternalError
from triptych.shared.messages import InstanceId, RequestId, TokenBatch, TokenChunk

REQUEST, DECODE, OTHER = RequestId("r-1"), InstanceId("decode-0-a"), InstanceId("decode-1-b")


def batch(*chunks: TokenChunk, sender: InstanceId = DECODE) -> TokenBatch:
    return TokenBatch(sender, chunks)


def chunk(seq: int, *token_ids: int, **fields: object) -> TokenChunk:
    return TokenChunk(REQUEST, seq, token_ids, **fields)  # type: ignore[arg-type]


async def test_tokens_in_order_until_the_end() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=10, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, 5), TokenChunk(RequestId("another"), 1, (9,))))
        assert await stream.next() == Tokens((5,))
        streams.on_event(batch(chunk(2)))  # a sign of life
        streams.on_event(batch(chunk(2, 6, 7)))
        streams.on_event(batch(chunk(4, 8, finish_reason="length")))
        streams.on_event(batch(chunk(5, 8)))  # after the end
        assert await stream.next() == Tokens((6, 7, 8), "length")
    assert len(streams) == 0
    streams.on_event(batch(chunk(5, 8)))  # of a request that is over


async def test_only_the_asked_instance_counts() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=10, remaining_s=60) as stream:
        streams.expect(REQUEST, OTHER, 1)
        streams.on_event(batch(chunk(1, 1), sender=OTHER))
        streams.expect(REQUEST, DECODE, 1)  # the other one refused after all
        streams.on_event(batch(chunk(2, 2), sender=OTHER))
        streams.on_event(batch(chunk(1, 3)))
        streams.on_lost(OTHER)
        assert await stream.next() == Tokens((3,))


@pytest.mark.parametrize("seq", [0, 1, 3])
async def test_a_gap_or_a_repetition_is_an_error_after_what_was_in_order(seq: int) -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=10, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, 5)))
        streams.on_event(batch(chunk(seq, 6)))
        assert await stream.next() == Tokens((5,))
        with pytest.raises(InstanceLost):
            await stream.next()


async def test_more_tokens_than_asked_for() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=3, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, 5, 6, 7)))
        with pytest.raises(InternalError):
            await stream.next()


async def test_errors_of_the_instance_are_raised_as_they_are() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, error=BadRequest("no", code="odd").to_wire())))
        with pytest.raises(BadRequest, match="no"):
            await stream.next()


async def test_an_abort_by_the_instance_is_a_loss() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, finish_reason="abort")))
        with pytest.raises(InstanceLost):
            await stream.next()


async def test_a_lost_instance_wakes_who_waits() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        streams.on_lost(DECODE)
        with pytest.raises(InstanceLost):
            await waiting


async def test_silence_and_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=0.02) as stream:
        streams.expect(REQUEST, DECODE, 1)
        with pytest.raises(DeadlineExceeded):
            await stream.next()
    monkeypatch.setattr(token_streams, "SILENCE_S", 0.02)
    with streams.open(REQUEST, max_tokens=9, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        streams.on_event(batch(chunk(1, 4)))
        assert await stream.next() == Tokens((4,))
        with pytest.raises(InstanceLost, match="silent"):
            await stream.next()


async def test_signs_of_life_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own: a machine that stands still is no silence either."""
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=60) as stream:
        streams.expect(REQUEST, DECODE, 1)
        waiting = asyncio.create_task(stream.next())
        for _ in range(5):
            await asyncio.sleep(0)
            now_s += 0.9 * token_streams.SILENCE_S
            streams.on_event(batch(chunk(1)))
            await asyncio.sleep(0)
        assert not waiting.done()
        now_s += 1.1 * token_streams.SILENCE_S
        with pytest.raises(InstanceLost, match="silent"):
            await waiting


async def test_a_whole_output_comes_in_one() -> None:
    streams = TokenStreams()
    with streams.open(REQUEST, max_tokens=9, remaining_s=60, whole=True) as stream:
        streams.expect(REQUEST, DECODE, 1)
        waiting = asyncio.create_task(stream.next())
        for seq in (1, 2, 3):
            streams.on_event(batch(chunk(seq, 10 + seq)))
            await asyncio.sleep(0)
        assert not waiting.done()
        streams.on_event(batch(chunk(4, finish_reason="stop")))
        assert await waiting == Tokens((11, 12, 13), "stop")
