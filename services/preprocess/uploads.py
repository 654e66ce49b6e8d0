"""Internal HTTP endpoints of preprocess, for routers: POST /media takes a picture's bytes, POST /blobs leases bytes as a
tensor (a long prompt). Raw bodies; headers X-Request-Id and X-Router-Id. Bound to bind_host only, never shown to clients.

Errors are answered as {"error": WireError} with its status.
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
from triptych.shared.errors import BadRequest, DeadlineExceeded, TriptychError, WireError
from triptych.shared.messages import InstanceId, RequestId, TensorRef
from triptych.shared.request_tasks import RequestTasks

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class MediaAnswer(msgspec.Struct, frozen=True):
    """Of POST /media."""

    media_id: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Of both, with the error's status."""

    error: WireError


@dataclass(frozen=True, slots=True)
class Uploads:
    """lease_blob puts the bytes in the transport's store for a request; refuse raises when no new work is taken."""

    tasks: RequestTasks
    store: MediaStore
    timeout_s: float
    lease_blob: Callable[[bytearray, RequestId], Awaitable[TensorRef]]
    refuse: Callable[[], None]

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/media", self.media, methods=["POST"], include_in_schema=False)
        app.add_api_route("/blobs", self.blobs, methods=["POST"], include_in_schema=False)

    async def media(self, request: Request) -> Response:
        """Keeps the body until its PreprocessRequest comes; answers MediaAnswer."""
        return await self._answer(request, self._keep)

    async def blobs(self, request: Request) -> Response:
        """Leases the body as a uint8 tensor; answers its TensorRef."""
        return await self._answer(request, self._lease)

    async def _keep(self, buffer: MediaBuffer, request_id: RequestId) -> msgspec.Struct:
        return MediaAnswer(self.store.keep(buffer, request_id))

    async def _lease(self, buffer: MediaBuffer, request_id: RequestId) -> msgspec.Struct:
        if not buffer.data:
            raise BadRequest("the body is empty")
        with buffer:
            return await self.lease_blob(buffer.data, request_id)

    async def _answer(self, request: Request, use: Callable[[MediaBuffer, RequestId], Awaitable[msgspec.Struct]]) -> Response:
        try:
            self.refuse()
            request_id, router_id = RequestId(_id_of(request, "x-request-id")), InstanceId(_id_of(request, "x-router-id"))
            with self.tasks.track(request_id, router_id):
                async with asyncio.timeout(self.timeout_s):
                    answer = await use(await self._read(request), request_id)
        except TimeoutError:
            return _error_response(DeadlineExceeded("the upload took too long"))
        except ClientDisconnect:
            return _error_response(BadRequest("the upload broke off"))
        except TriptychError as error:
            return _error_response(error)
        return _json(answer, 200)

    async def _read(self, request: Request) -> MediaBuffer:
        buffer = MediaBuffer(self.store)
        try:
            announced = request.headers.get("content-length", "")
            if announced.isdecimal():
                buffer.check(int(announced))
            async for chunk in request.stream():
                buffer.append(chunk)
        except BaseException:
            buffer.close()
            raise
        return buffer


def _id_of(request: Request, header: str) -> str:
    value = request.headers.get(header, "")
    if not _ID.fullmatch(value):
        raise BadRequest(f"the header {header} is missing or not an id")
    return value


def _error_response(error: TriptychError) -> Response:
    return _json(ErrorAnswer(error.to_wire()), error.status)


def _json(answer: msgspec.Struct, status: int) -> Response:
    return Response(msgspec.json.encode(answer), status_code=status, media_type="application/json")
