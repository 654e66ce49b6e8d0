"""One request for text at the HTTP edge: reads and checks it, runs it, writes the answer, and accounts for its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from triptych.services.router.asks import Ask, read_chat, read_completion
from triptych.services.router.choices import Choice, merged, pieces_of
from triptych.services.router.client_link import BodyShare, ClientGoneError, read_body, while_connected
from triptych.services.router.edge import Edge, Read
from triptych.services.router.http_errors import as_typed, error_object, error_response
from triptych.services.router.job import Job
from triptych.services.router.output import Output, Piece
from triptych.services.router.record import Phase, RequestRecord
from triptych.services.router.responses import DONE, Bodies, ChatBodies, CompletionBodies, trace_of, usage_of
from triptych.services.router.siblings import Siblings
from triptych.services.router.sse import EventStream
from triptych.shared.errors import TriptychError
from triptych.shared.messages import FinishReason

SEND_GRACE_S = 5.0  # chosen: time after a request's deadline to get the last bytes to a slow client
CLIENT_GONE_STATUS = 499  # nginx's code, for metrics only
TRACE_HEADER = "x-triptych-trace"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Api:
    """One of the two forms of requests and answers."""

    id_prefix: str
    read: Read[Ask]
    bodies: type[Bodies]


CHAT = Api("chatcmpl", read_chat, ChatBodies)
COMPLETIONS = Api("cmpl", read_completion, CompletionBodies)


class Session:
    """`respond` once. The session is over when the response has been sent. `record` is the first choice's."""

    def __init__(self, edge: Edge, api: Api, record: RequestRecord, request: Request) -> None:
        self._edge = edge
        self._api = api
        self._record = record
        self._request = request
        self._wants_trace = request.headers.get(TRACE_HEADER) == "1"
        self._body = b""
        self._share = BodyShare(edge.bodies)
        self._records = [record]
        self._num_choices = 1
        self._pieces: AsyncGenerator[Piece] | None = None
        self._first: asyncio.Task[Piece] | None = None
        self._finish_reason: FinishReason | None = None

    async def respond(self) -> Response:
        """The answer, or an error as JSON: nothing is sent until the first token is there, or for ping_interval_s."""
        try:
            settings = self._edge.settings
            timeout_s = min(settings.body_timeout_s, self._record.remaining_s(time.monotonic()))
            self._body = await read_body(self._request, settings.max_body_bytes, timeout_s, self._share.take)
            self._edge.admit(self._record)
            response = await while_connected(self._request.receive, self._respond())
        except ClientGoneError:
            await self._close(Phase.CANCELLED, CLIENT_GONE_STATUS)
            return Response(status_code=CLIENT_GONE_STATUS)
        except asyncio.CancelledError:
            await self._close(Phase.CANCELLED, CLIENT_GONE_STATUS)
            raise
        except Exception as error:
            typed = as_typed(error)
            self._tell(typed)
            await self._close(Phase.FAILED, typed.status)
            return error_response(typed)
        if not isinstance(response, EventStream):
            await self._close(Phase.FINISHED, 200)
        return response

    async def _respond(self) -> Response:
        body, self._body = self._body, b""  # pictures and all, it is let go of when it has been read
        ask = await self._edge.read(self._api.read, body)
        self._num_choices = ask.generation.num_choices
        bodies = self._api.bodies(
            f"{self._api.id_prefix}-{self._record.base_id}",
            int(time.time()),
            self._edge.model.name,
            self._edge.texts,
            ask.generation.include_usage,
        )
        choices = self._choices(ask)
        self._records = [choice.record for choice in choices]
        self._pieces = pieces = merged([pieces_of(self._edge.parts, choice) for choice in choices])
        if not ask.generation.stream:
            return await self._whole(bodies, pieces)
        self._first = first = asyncio.create_task(_next(pieces), name="first token")
        ping_interval_s = self._edge.settings.ping_interval_s
        await asyncio.wait({first}, timeout=ping_interval_s)
        if first.done():
            first.result()  # an error here still has a status of its own
        timeout_s = self._record.remaining_s(time.monotonic()) + SEND_GRACE_S
        events = self._events(bodies, first, pieces, ask.generation.include_usage)
        return EventStream(events, timeout_s, ping_interval_s, self._on_streamed)

    def _choices(self, ask: Ask) -> list[Choice]:
        """Each is a request of its own to the stages: its record, its seed, its output."""
        made: list[Choice] = []
        generation, parts = ask.generation, self._edge.parts
        is_shared = bool(ask.sources) and generation.num_choices > 1 and parts.cache.rules.keeps_embeddings
        for prompt in ask.prompts:
            siblings = Siblings() if is_shared else None
            for i in range(generation.num_choices):
                job = Job(
                    prompt=prompt,
                    sources=list(ask.sources),
                    sampling=generation.params(i, parts.limits.stop_token_ids),
                    is_streaming=generation.stream,
                    is_watched=bool(generation.stop),
                    param=ask.param,
                    terms=generation.terms,
                    siblings=siblings,
                )
                output = partial(Output, len(made), self._edge.texts, generation.stop, job.sampling.min_tokens)
                made.append(Choice(job, self._record if not made else self._record.sibling(len(made)), output))
        return made

    async def _whole(self, bodies: Bodies, pieces: AsyncGenerator[Piece]) -> Response:
        whole = sorted([piece async for piece in pieces], key=lambda piece: piece.index)
        self._finish_reason = whole[0].finish_reason
        extra = {"triptych": trace_of(self._record)} if self._wants_trace else {}
        write = partial(bodies.whole, whole, self._usage(), extra)
        has_logprobs = any(piece.tokens for piece in whole)
        body = await self._edge.off_loop(write) if has_logprobs else write()
        return Response(body, media_type="application/json")

    async def _events(
        self, bodies: Bodies, first: asyncio.Task[Piece], rest: AsyncGenerator[Piece], with_usage: bool
    ) -> AsyncGenerator[bytes]:
        try:
            opening = b"".join(map(bodies.opening, range(len(self._records))))
            if opening and not first.done():
                yield opening
                opening = b""
            piece = await first
            self._first = None
            yield opening + self._news(bodies, piece)
            if len(self._records) == 1:
                self._share.give_back()  # there will be no other attempt: the pictures are gone
            async for piece in rest:
                if data := self._news(bodies, piece):
                    yield data
        except Exception as error:
            typed = as_typed(error)
            self._tell(typed)
            await self._close(Phase.FAILED, typed.status)
            yield b"data: " + msgspec.json.encode(error_object(typed)) + b"\n\n"
            return
        # before the client knows, so that its place is free when it asks again
        await self._close(Phase.FINISHED, 200)
        yield (bodies.usage_event(self._usage()) if with_usage else b"") + DONE

    def _news(self, bodies: Bodies, piece: Piece) -> bytes:
        if piece.finish_reason is None:
            return bodies.events(piece)
        self._finish_reason = piece.finish_reason
        return bodies.events(piece, trace_of(self._records[piece.index]) if self._wants_trace else None)

    def _usage(self) -> dict[str, object]:
        return usage_of(self._records, self._num_choices)

    def _tell(self, error: TriptychError) -> None:
        if error.status >= 500:
            attempts = len(self._record.attempts)
            _log.warning(error.message, code=error.code, request_id=self._record.base_id, attempts=attempts)

    async def _on_streamed(self) -> None:
        """A stream that came to its end has closed the session already."""
        await self._close(Phase.CANCELLED, CLIENT_GONE_STATUS)

    async def _close(self, phase: Phase, status: int) -> None:
        """Whatever still runs for this request ends here: closing the iterator releases it at every instance."""
        try:
            if self._first is not None:
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)
            if self._pieces is not None:
                await self._pieces.aclose()
        finally:
            self._share.give_back()
            before = self._record.phase
            if self._record.end(phase, time.monotonic()):
                self._edge.on_end(self._records, status, self._finish_reason, before)


async def _next(pieces: AsyncGenerator[Piece]) -> Piece:
    return await anext(pieces)
