"""The HTTP connections of clients: their bodies within bounds, and whether they are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from triptych.shared.errors import BadRequest, Overloaded

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads an answer."""


class BodyStore:
    """Counts the bytes of all bodies that are kept; refuses when they get too many."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded when that many more do not fit."""
        if self.num_bytes + num_bytes > self.capacity_bytes:
            raise Overloaded("too many large requests are being served; try again later")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class BodyShare:
    """What one request has of a BodyStore."""

    def __init__(self, store: BodyStore) -> None:
        self._store = store
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded as the store does."""
        self._store.take(num_bytes)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """All of it. Nothing the second time."""
        self._store.give_back(self._num_bytes)
        self._num_bytes = 0


async def read_body(request: Request, max_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
    """The whole body. take: called with the size of each piece before it is kept; may raise.

    Raises:
        BadRequest: it is larger than max_bytes (413), and the rest is not read; or it did not come within timeout_s (408).
        ClientGoneError: the client left while sending.
    """
    too_large = BadRequest(f"the body is larger than {max_bytes} bytes", code="request_too_large", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    raise too_large
                take(len(piece))
                pieces.append(piece)
    except TimeoutError:
        raise BadRequest("the request did not arrive in time", code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(pieces)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves. The body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    scope = asyncio.timeout(None)
    watching = asyncio.create_task(_until_gone(receive, scope), name="client")
    try:
        async with scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientGoneError from None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _until_gone(receive: Receive, scope: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.reschedule(0)  # the past
