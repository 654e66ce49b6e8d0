"""Sends each request when the trace has it, whatever the server does, and makes exactly one outcome of each.

A request waits only for the turn before it in its session, and for a place under the concurrency cap; the latter counts as lag.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

from triptych.loadgen.replay.content import Content, Message
from triptych.loadgen.replay.exchange import Exchange
from triptych.loadgen.replay.outcome import UNFINISHED, RequestOutcome
from triptych.loadgen.replay.sessions import Sessions
from triptych.loadgen.replay.stream import AnswerStream
from triptych.loadgen.traces.row import TraceRow

BATCH_ROWS = 256  # read at once, in a thread; chosen: a fraction of a second's worth
MAX_OPEN = 20_000  # requests that were due and have not ended; chosen: beyond it sending waits, and its lag shows that
GRACE_S = 5.0  # chosen: what runs when the user stops the replay may end by itself


@dataclass(frozen=True, slots=True)
class SendOptions:
    """concurrency: most requests at once; None: as many as the trace wants. cancel_rate: share that the client cuts off.
    first_index: of the rows, for contents that no other part of the run has."""

    concurrency: int | None = None
    cancel_rate: float = 0.0
    warm_up_s: float = 0.0
    seed: int = 0
    first_index: int = 0


class _Sending:
    """A request on its way."""

    __slots__ = ("index", "message", "row", "scheduled_s", "sent_s", "stream")

    def __init__(self, index: int, row: TraceRow) -> None:
        self.index = index
        self.row = row
        self.scheduled_s = row.arrival_s
        self.sent_s: float | None = None
        self.stream = AnswerStream()
        self.message: Message | None = None

    def outcome(self, end_s: float, warm_up_s: float) -> RequestOutcome:
        stream, message = self.stream, self.message
        is_answered = message is not None and message.answer is not None and stream.error is None
        return RequestOutcome(
            index=self.index,
            request_class=self.row.request_class,
            num_images=self.row.num_images,
            scheduled_s=self.scheduled_s,
            sent_s=end_s if self.sent_s is None else self.sent_s,
            end_s=end_s,
            first_token_s=stream.first_s,
            last_token_s=stream.last_s,
            token_gaps_s=tuple(round(gap_s, 6) for gap_s in stream.gaps_s),
            num_prompt_tokens=stream.num_prompt_tokens,
            num_cached_tokens=stream.num_cached_tokens,
            num_output_tokens=stream.num_output_tokens,
            num_forced_tokens=message.max_tokens if message is not None and message.is_forced else 0,
            error=stream.error,
            is_right=stream.text.strip() == message.answer if is_answered and message else None,
            is_warm_up=self.scheduled_s < warm_up_s,
        )


class OpenLoop:
    """`run` sends rows; `record` gets each outcome as soon as there is one. num_due: rows whose time has come; next_s:
    when the next one's comes. was_full: whether sending waited, as MAX_OPEN requests had not ended. error_examples: by kind,
    what was said first."""

    def __init__(
        self,
        exchange: Exchange,
        content: Content,
        options: SendOptions,
        record: Callable[[RequestOutcome], None],
    ) -> None:
        self._exchange = exchange
        self._content = content
        self._options = options
        self._clock = exchange.clock
        self._record = record
        self._sessions = Sessions()
        self._places = asyncio.Semaphore(options.concurrency or MAX_OPEN)
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._num_tokens = self._num_chunks = 1  # of whole answers: servers may send several tokens at once
        self.num_due = 0
        self.next_s = 0.0
        self.was_full = False
        self._is_stopping = False
        self.error_examples: dict[str, str] = {}

    async def run(self, rows: Iterator[TraceRow], stop: asyncio.Event) -> None:
        """Until all have ended; when `stop` is set sending ends at once, and what runs is cut off after GRACE_S."""
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_all(rows))
            stopping = group.create_task(stop.wait())
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._is_stopping = True
                self._due.cancel()
                await asyncio.wait({sending}, timeout=GRACE_S)
                sending.cancel()
            stopping.cancel()

    async def _send_all(self, rows: Iterator[TraceRow]) -> None:
        async with asyncio.TaskGroup() as requests:
            self._due = requests.create_task(self._start_when_due(rows, requests))

    async def _start_when_due(self, rows: Iterator[TraceRow], requests: asyncio.TaskGroup) -> None:
        async with aclosing(read_ahead(rows)) as ahead:
            async for row in ahead:
                if not self.num_due:
                    self._clock.start()
                self.next_s = row.arrival_s
                if (left_s := row.arrival_s - self._clock()) > 0:
                    await asyncio.sleep(left_s)
                self.was_full |= self._open.locked()
                await self._open.acquire()
                requests.create_task(self._request(self._options.first_index + self.num_due, row))
                self.num_due += 1

    async def _request(self, index: int, row: TraceRow) -> None:
        request = _Sending(index, row)
        try:
            await self._in_turn(request)
        except BaseException:
            request.stream.fail(UNFINISHED, "")
            raise
        finally:
            self._open.release()
            if request.stream.error is not None:
                self.error_examples.setdefault(request.stream.error, request.stream.told)
            else:
                self._num_tokens += request.stream.num_output_tokens
                self._num_chunks += request.stream.num_chunks
            self._record(request.outcome(self._clock(), self._options.warm_up_s))

    async def _in_turn(self, request: _Sending) -> None:
        row, stream = request.row, request.stream
        history = self._sessions.of(row.session)
        async with history.lock:
            # A user who is still reading the last answer asks later than the trace has it: that is no lag of ours.
            request.scheduled_s = max(row.arrival_s, history.ended_s)
            async with self._places:
                if self._is_stopping:
                    stream.fail(UNFINISHED, "")
                    return
                request.message = message = self._content.message(request.index, row, history.num_tokens)
                if message.begins_anew:
                    history.forget()
                keeps_history = row.session is not None and self._content.keeps_history
                stream.keeps_text = keeps_history or message.answer is not None
                cut_after = self._cut_after(request.index, message)
                request.sent_s = self._clock()
                await self._exchange.ask(history.pieces, message, stream, cut_after)
            history.ended_s = self._clock()
            if keeps_history and stream.error is None:
                num_tokens = stream.num_prompt_tokens + stream.num_output_tokens
                history.add(message.pieces, stream.text, num_tokens or row.num_context_tokens + row.num_output_tokens)

    def _cut_after(self, index: int, message: Message) -> int | None:
        """After how many chunks the client goes away, for a share of the requests: anywhere in a forced answer, else early."""
        if not self._options.cancel_rate:
            return None
        rng = random.Random(f"cut {self._options.seed} {index}")
        is_cut = rng.random() < self._options.cancel_rate
        if not is_cut:
            return None
        num_tokens = rng.randint(1, message.max_tokens if message.is_forced else 1)
        return max(1, num_tokens * self._num_chunks // max(self._num_chunks, self._num_tokens))


async def read_ahead(rows: Iterator[TraceRow]) -> AsyncGenerator[TraceRow]:
    """The rows, read in a thread, one batch while another is sent."""

    def read() -> asyncio.Task[list[TraceRow]]:
        return asyncio.create_task(asyncio.to_thread(lambda: list(islice(rows, BATCH_ROWS))))

    coming = read()
    try:
        while batch := await coming:
            coming = read()
            for row in batch:
                yield row
    finally:
        coming.cancel()
