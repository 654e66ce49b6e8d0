"""The HTTP connection of one client: its body within bounds, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from triptych.shared.errors import BadRequest

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BadRequest: it is larger than max_bytes (413); the rest is not read.
        ClientGoneError: the client left while sending.
    """
    too_large = BadRequest(f"the body is larger than {max_bytes} bytes", code="request_too_large", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async for piece in request.stream():
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise too_large
            pieces.append(piece)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(pieces)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves. The body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
        for task in (working, leaving):
            if not task.cancelled():
                task.exception()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
