"""One chat request at the HTTP edge: reads and checks it, runs it, writes the answer, and accounts for its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from triptych.services.router.api_types import parse_chat
from triptych.services.router.attempt import Job, Parts
from triptych.services.router.client_link import BodyStore, ClientGoneError, read_body, while_connected
from triptych.services.router.data_url import read_source
from triptych.services.router.detokenizer import Detokenizer
from triptych.services.router.http_errors import as_typed, error_object, error_response
from triptych.services.router.prompt import PromptBuilder
from triptych.services.router.record import Phase, RequestRecord
from triptych.services.router.responses import Header, chunk, completion, trace, usage_chunk
from triptych.services.router.retry import run_request
from triptych.services.router.sse import DONE, EventStream, event
from triptych.services.router.token_streams import Tokens
from triptych.shared.errors import BadRequest, Overloaded, TriptychError
from triptych.shared.messages import FinishReason
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import Settings

PREPARE_TIMEOUT_S = 10.0  # chosen: a prompt of 100 000 tokens takes under a second to render and tokenize
SEND_GRACE_S = 5.0  # chosen: time after a request's deadline to get the last bytes to a slow client
MIN_TEXT_CHARS, CHARS_PER_TOKEN = 1 << 16, 64  # chosen: no real text has longer tokens on average
CLIENT_GONE_STATUS = 499  # nginx's code, for metrics only
TRACE_HEADER = "x-triptych-trace"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """What a router serves."""

    name: str
    prompts: PromptBuilder


@dataclass(frozen=True, slots=True)
class Edge:
    """What all sessions share. on_end: (record, status, finish_reason, phase before the end), called exactly once each."""

    settings: Settings
    model: Model
    parts: Parts
    workers: Executor
    bodies: BodyStore
    on_end: Callable[[RequestRecord, int, FinishReason | None, Phase], None]


class ChatSession:
    """`respond` once. The session is over when the response has been sent."""

    def __init__(self, edge: Edge, record: RequestRecord, request: Request) -> None:
        self._edge = edge
        self._record = record
        self._request = request
        self._wants_trace = request.headers.get(TRACE_HEADER) == "1"
        self._detokenizer = Detokenizer(edge.model.prompts.tokenizer)
        self._header = Header(f"chatcmpl-{record.base_id}", int(time.time()), edge.model.name)
        self._body = b""
        self._num_body_bytes = 0
        self._wants_usage = False
        self._finish_reason: FinishReason | None = None
        self._pieces: AsyncGenerator[Tokens] | None = None
        self._failure: TriptychError | None = None

    async def respond(self) -> Response:
        """The answer, or an error as JSON: until the first token is there nothing is sent."""
        try:
            max_bytes, timeout_s = self._edge.settings.max_body_bytes, self._record.remaining_s(time.monotonic())
            self._body = await read_body(self._request, max_bytes, timeout_s, self._take_bytes)
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
        job = await self._prepare()
        self._pieces = run_request(self._edge.parts, job, self._record)
        first = await anext(self._pieces)
        if not job.is_streaming:
            return JSONResponse(await self._whole(first, self._pieces))
        self._give_back_bytes()  # there will be no other attempt: the pictures are gone
        timeout_s = self._record.remaining_s(time.monotonic()) + SEND_GRACE_S
        return EventStream(self._events(first, self._pieces), timeout_s, self._on_streamed)

    def _take_bytes(self, num_bytes: int) -> None:
        self._edge.bodies.take(num_bytes)
        self._num_body_bytes += num_bytes

    def _give_back_bytes(self) -> None:
        self._edge.bodies.give_back(self._num_body_bytes)
        self._num_body_bytes = 0

    async def _prepare(self) -> Job:
        """Parsing, rendering and tokenizing may take long: not on the event loop. The body, pictures and all, is let go of."""
        max_chars = max(MIN_TEXT_CHARS, CHARS_PER_TOKEN * self._edge.parts.limits.max_model_len())
        call = self._edge.workers.submit(self._prepare_in_thread, self._body, max_chars)
        self._body = b""
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                return await asyncio.wrap_future(call)
        except TimeoutError:
            if call.cancel():  # it never began
                raise Overloaded("too many prompts wait to be tokenized; try again later") from None
            raise BadRequest("the prompt takes too long to tokenize; make it shorter", param="messages") from None

    def _prepare_in_thread(self, body: bytes, max_chars: int) -> Job:
        edge = self._edge
        chat = parse_chat(body, edge.settings, max_chars)
        if chat.model not in ("", edge.model.name):
            raise BadRequest(
                f"there is no model {chat.model} here; the model is {edge.model.name}",
                code="model_not_found",
                status=404,
                param="model",
            )
        self._wants_usage = chat.include_usage
        return Job(
            prompt=edge.model.prompts.build(chat),
            sources=[read_source(image, edge.settings.max_media_bytes) for image in chat.images],
            sampling=SamplingParams(
                max_tokens=chat.max_tokens or 0,
                stop_token_ids=() if chat.ignore_eos else edge.parts.limits.stop_token_ids,
                temperature=chat.temperature,
                seed=chat.seed,
            ),
            is_streaming=chat.stream,
        )

    def _text(self, piece: Tokens) -> str:
        self._record.num_output_tokens += len(piece.token_ids)
        text = self._detokenizer.push(piece.token_ids)
        if piece.finish_reason is None:
            return text
        self._finish_reason = piece.finish_reason
        return text + self._detokenizer.finish()

    async def _whole(self, first: Tokens, rest: AsyncIterator[Tokens]) -> dict[str, object]:
        text = self._text(first)
        async for piece in rest:
            text += self._text(piece)
        body = completion(self._header, text, self._finish_reason or "stop", self._record)
        return {**body, "triptych": trace(self._record)} if self._wants_trace else body

    async def _events(self, first: Tokens, rest: AsyncIterator[Tokens]) -> AsyncGenerator[bytes]:
        try:
            yield event(chunk(self._header, {"role": "assistant", "content": ""}, None, self._wants_usage)) + self._event(first)
            async for piece in rest:
                if data := self._event(piece):
                    yield data
        except Exception as error:
            self._failure = as_typed(error)
            self._tell(self._failure)
            yield event(error_object(self._failure))
            return
        yield (event(usage_chunk(self._header, self._record)) if self._wants_usage else b"") + DONE

    def _event(self, piece: Tokens) -> bytes:
        text = self._text(piece)
        data = event(chunk(self._header, {"content": text}, None, self._wants_usage)) if text else b""
        if piece.finish_reason is None:
            return data
        last = chunk(self._header, {}, piece.finish_reason, self._wants_usage)
        return data + event({**last, "triptych": trace(self._record)} if self._wants_trace else last)

    def _tell(self, error: TriptychError) -> None:
        if error.status >= 500:
            attempts = len(self._record.attempts)
            _log.warning(error.message, code=error.code, request_id=self._record.base_id, attempts=attempts)

    async def _on_streamed(self, is_sent: bool) -> None:
        if self._failure is not None:
            await self._close(Phase.FAILED, self._failure.status)
        elif is_sent:
            await self._close(Phase.FINISHED, 200)
        else:
            await self._close(Phase.CANCELLED, CLIENT_GONE_STATUS)

    async def _close(self, phase: Phase, status: int) -> None:
        """Whatever still runs for this request ends here: closing the iterator releases it at every instance."""
        try:
            if self._pieces is not None:
                await self._pieces.aclose()
        finally:
            self._give_back_bytes()
            before = self._record.phase
            if self._record.end(phase, time.monotonic()):
                self._edge.on_end(self._record, status, self._finish_reason, before)
