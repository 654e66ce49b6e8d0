"""The outputs of one request: each choice is computed as a request of its own, their pieces come as one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field

from triptych.services.router.job import Job, Parts
from triptych.services.router.output import Output, OutputToken, Piece
from triptych.services.router.record import RequestRecord
from triptych.services.router.retry import run_request

MAX_WAITING_PIECES = 64  # chosen: of all choices; then they wait for a slow client


@dataclass(frozen=True, slots=True)
class Choice:
    """output makes one."""

    job: Job
    record: RequestRecord
    output: Callable[[], Output]


async def pieces_of(parts: Parts, choice: Choice) -> AsyncGenerator[Piece]:
    """As they come when the job is streaming, the first one with the first token, even if its text is not certain yet; else
    one piece with everything. A choice that met a stop string is released at every stage at once. Raises TriptychError."""
    output, whole, siblings = choice.output(), _Whole(), choice.job.siblings
    turn = siblings.turn(choice.record.remaining_s(time.monotonic())) if siblings is not None else nullcontext()
    async with turn, aclosing(run_request(parts, choice.job, choice.record)) as run:
        async for tokens in run:
            piece = output.push(tokens)
            choice.record.num_output_tokens = output.num_tokens
            if choice.job.is_streaming:
                yield piece
            else:
                whole.add(piece)
            if piece.finish_reason is not None:
                if not choice.job.is_streaming:
                    yield whole.piece(piece)
                return


def merged(runs: Sequence[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    """The pieces of all runs, each run's in order. The first error ends all."""
    return runs[0] if len(runs) == 1 else _merged(runs)


async def _merged(runs: Sequence[AsyncGenerator[Piece]]) -> AsyncGenerator[Piece]:
    waiting: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(MAX_WAITING_PIECES)
    tasks = [asyncio.create_task(_pump(run, waiting), name="choice") for run in runs]
    try:
        num_open = len(tasks)
        while num_open:
            item = await waiting.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(run: AsyncGenerator[Piece], waiting: asyncio.Queue[Piece | BaseException | None]) -> None:
    async with aclosing(run):
        try:
            async for piece in run:
                await waiting.put(piece)
        except Exception as error:
            await waiting.put(error)
    await waiting.put(None)


@dataclass(slots=True)
class _Whole:
    """All pieces of a choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens

    def piece(self, last: Piece) -> Piece:
        return Piece(last.index, "".join(self.texts), last.finish_reason, tuple(self.tokens))
