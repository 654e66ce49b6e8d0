"""Internal HTTP endpoints of preprocess, for routers: POST /media has a picture's bytes preprocessed, POST /blobs leases bytes
as a tensor (a long prompt). Raw bodies; the header X-Triptych-Request is the PreprocessRequest of the first, X-Request-Id and
X-Router-Id are what the second needs. Bound to bind_host only, never shown to clients.

Answers are MessagePack: PreprocessReply, TensorRef, or ErrorReply with the error's status.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from triptych.services.preprocess.media import MediaBuffer, MediaStore
from triptych.shared.errors import BadRequest, DeadlineExceeded, TriptychError
from triptych.shared.messages import InstanceId, PreprocessReply, PreprocessRequest, RequestId, TensorRef
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.wire import REQUEST_HEADER, encode, error_reply, request_of_header

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
Bring = Callable[[], Awaitable[MediaBuffer]]


@dataclass(frozen=True, slots=True)
class Uploads:
    """preprocess does a request with what the second argument brings; lease_blob puts bytes in the transport's store for a
    request; refuse raises when no new work is taken."""

    tasks: RequestTasks
    store: MediaStore
    timeout_s: float
    preprocess: Callable[[PreprocessRequest, Bring], Awaitable[PreprocessReply]]
    lease_blob: Callable[[bytearray, RequestId], Awaitable[TensorRef]]
    refuse: Callable[[], None]

    def add_routes(self, app: FastAPI) -> None:
        for path, endpoint in (("/media", self.media), ("/blobs", self.blobs)):
            app.add_route(path, endpoint, methods=["POST"], include_in_schema=False)

    async def media(self, http: Request) -> Response:
        """Preprocesses the body, a picture."""

        async def work() -> bytes:
            request = _request_of(http)
            with self.tasks.track(request.request_id, request.router_id):
                return encode(await self.preprocess(request, lambda: self._read(http)))

        return await self._answer(work)

    async def blobs(self, http: Request) -> Response:
        """Leases the body as a uint8 tensor."""

        async def work() -> bytes:
            request_id, router_id = RequestId(_id_of(http, "x-request-id")), InstanceId(_id_of(http, "x-router-id"))
            with self.tasks.track(request_id, router_id), await self._read(http) as buffer:
                if not buffer.data:
                    raise BadRequest("the body is empty")
                return msgspec.msgpack.encode(await self.lease_blob(buffer.data, request_id))

        return await self._answer(work)

    async def _answer(self, work: Callable[[], Awaitable[bytes]]) -> Response:
        error: TriptychError
        try:
            self.refuse()
            async with asyncio.timeout(self.timeout_s):
                return Response(await work(), media_type="application/msgpack")
        except TimeoutError:
            error = DeadlineExceeded("the upload took too long")
        except ClientDisconnect:
            error = BadRequest("the upload broke off")
        except TriptychError as refused:
            error = refused
        return Response(encode(error_reply(error)), status_code=error.status, media_type="application/msgpack")

    async def _read(self, http: Request) -> MediaBuffer:
        buffer = MediaBuffer(self.store)
        try:
            announced = http.headers.get("content-length", "")
            if announced.isdecimal():
                buffer.check(int(announced))
            async for chunk in http.stream():
                buffer.append(chunk)
        except BaseException:
            buffer.close()
            raise
        return buffer


def _request_of(http: Request) -> PreprocessRequest:
    try:
        request = request_of_header(http.headers.get(REQUEST_HEADER, ""))
    except msgspec.MsgspecError:
        request = None
    if not isinstance(request, PreprocessRequest):
        raise BadRequest(f"the header {REQUEST_HEADER} is missing or no PreprocessRequest")
    return request


def _id_of(http: Request, header: str) -> str:
    value = http.headers.get(header, "")
    if not _ID.fullmatch(value):
        raise BadRequest(f"the header {header} is missing or not an id")
    return value
