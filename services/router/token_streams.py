"""Output tokens as they come over the bus, given to the request that waits for them, checked for gaps and silence.

A buffer holds at most its request's max_tokens tokens, so a slow client bounds itself: nothing is dropped or grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, TriptychError, from_wire
from triptych.shared.messages import Event, FinishReason, InstanceId, KvRef, RequestId, StageTime, TokenBatch, TokenChunk
from triptych.shared.sampling_params import TokenLogprobs

SILENCE_S = 10.0  # chosen: five missed signs of life of a decode instance


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that came since the last ones, with as many logprobs when asked for. The last piece has finish_reason, the last
    from an instance that handed the request over kv; these have time, when the stage told it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    time: StageTime | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    kv: KvRef | None = None


class TokenStream:
    """One request's tokens, from one decode instance after the other. remaining_s: of the request. whole: nobody wants them
    before the last."""

    def __init__(self, max_tokens: int, remaining_s: float, whole: bool = False) -> None:
        self.instance_id: InstanceId | None = None
        self._loop = asyncio.get_running_loop()  # kept: asking for it is a system call, here one per token
        self._max_tokens = max_tokens
        self._until_s = self._loop.time() + remaining_s
        self._whole = whole
        self._waiting: asyncio.Future[None] | None = None  # whoever is in `next`
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at_s = 0.0
        self.expect(None, 0)

    def expect(self, instance_id: InstanceId | None, next_seq: int) -> None:
        """The request goes to this instance now; an earlier one refused it, or handed it over, and all of that was read."""
        self.close()
        self._heard_at_s = self._loop.time()
        self.instance_id = instance_id
        self._next_seq = next_seq
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: TokenChunk | None = None
        self._error: TriptychError | None = None
        self._has_news = False

    def feed(self, chunk: TokenChunk) -> None:
        """Take a chunk; what comes after the end is ignored."""
        if self._last is not None or self._error is not None:
            return
        self._heard_at_s = self._loop.time()
        if chunk.error is not None:
            self._error = from_wire(chunk.error)
        elif chunk.seq != self._next_seq:
            self._error = InstanceLost("output tokens were lost on their way")
        elif chunk.seq + len(chunk.token_ids) > self._max_tokens:
            self._error = InternalError("more output tokens than were asked for")
        elif chunk.finish_reason == "abort":
            self._error = InstanceLost("a decode instance gave the request up")
        else:
            self._next_seq += len(chunk.token_ids)
            self._token_ids += chunk.token_ids
            self._logprobs += chunk.logprobs
            if chunk.is_last:
                self._last = chunk
            elif self._whole or not chunk.token_ids:
                return
        self._wake()

    def fail(self, error: TriptychError) -> None:
        """End the stream here, after the tokens that are already buffered."""
        if self._last is None and self._error is None:
            self._error = error
            self._wake()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def next(self) -> Tokens:
        """What came since the last call, waiting for it. After an error there is nothing more.

        Raises:
            InstanceLost: nothing came for SILENCE_S, not even a sign of life; or tokens are missing.
            DeadlineExceeded: the request's time is over.
            TriptychError: what the instance reported.
        """
        if not self._has_news:
            self._watch()
            self._waiting = self._loop.create_future()
            await self._waiting  # bounded by the timer
        token_ids, self._token_ids = tuple(self._token_ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        if self._last is not None:
            return Tokens(token_ids, self._last.finish_reason, self._last.time, logprobs, self._last.kv)
        if self._error is None:
            self._has_news = False
        elif not token_ids:
            raise self._error
        return Tokens(token_ids, logprobs=logprobs)

    def _wake(self) -> None:
        self._has_news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _watch(self) -> None:
        """One timer for all tokens: each would be a good part of a token's cost."""
        if self._timer is None:
            self._heard_at_s = max(self._heard_at_s, self._loop.time())
            self._arm()

    def _arm(self) -> None:
        self._timer = self._loop.call_at(min(self._until_s, self._heard_at_s + SILENCE_S), self._on_timer)

    def _on_timer(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._until_s:
            self.fail(DeadlineExceeded("the request's time ran out"))
        elif now_s >= self._heard_at_s + SILENCE_S:
            self.fail(InstanceLost("a decode instance went silent"))
        else:
            self._arm()


class TokenStreams:
    """All open streams of this router, by request id."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, TokenStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self, request_id: RequestId, max_tokens: int, remaining_s: float, whole: bool = False) -> Iterator[TokenStream]:
        """Open before the decode request is sent: its first tokens may come before its reply."""
        stream = self._streams[request_id] = TokenStream(max_tokens, remaining_s, whole)
        try:
            yield stream
        finally:
            stream.close()
            del self._streams[request_id]

    def expect(self, request_id: RequestId, instance_id: InstanceId, next_seq: int) -> None:
        """From now on the request's tokens come from this instance, beginning with that number."""
        self._streams[request_id].expect(instance_id, next_seq)

    def on_event(self, event: Event) -> None:
        """Chunks of requests that are over, or from another instance than the one that was asked, are ignored."""
        if not isinstance(event, TokenBatch):
            return
        for chunk in event.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is not None and stream.instance_id == event.instance_id:
                stream.feed(chunk)

    def on_lost(self, instance_id: InstanceId) -> None:
        """Fail the streams of an instance that is gone."""
        for stream in self._streams.values():
            if stream.instance_id == instance_id:
                stream.fail(InstanceLost("a decode instance was lost", instance_id=instance_id))
