"""Server-sent events: one answer as `data:` events and, in its silences, pings. Whole events come ready from session.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.services.router.client_link import ClientGoneError, while_connected

PING = b": ping\n\n"  # a comment: clients and proxies see that the connection lives


class EventStream(Response):
    """Sends `events` as they come. However it ends (done, client gone, out of time, cancelled), `close` runs once.

    Args:
        events: whole events, already encoded; handles its own errors.
        timeout_s: longest time to send them in: bounds a client that stays but doesn't read.
        ping_interval_s: longest silence before a ping.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], timeout_s: float, ping_interval_s: float, close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s
        self._ping_interval_s = ping_interval_s
        self._close = close
        self._sent_at_s = 0.0
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await while_connected(receive, self._send(send))
        except (ClientGoneError, TimeoutError, OSError):
            pass  # nobody is there to be told
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        self._sent_at_s = loop.time()
        timer = loop.call_later(self._ping_interval_s, self._begin_pings, send)  # few streams need a task for them
        try:
            async with aclosing(self._events) as events:
                async for piece in events:
                    self._sent_at_s = loop.time()
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            timer.cancel()
            if self._pinging is not None:
                self._pinging.cancel()
                await asyncio.gather(self._pinging, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _begin_pings(self, send: Send) -> None:
        self._pinging = asyncio.create_task(self._ping(send), name="pings")

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._sent_at_s + self._ping_interval_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._sent_at_s = loop.time()
            await send({"type": "http.response.body", "body": PING, "more_body": True})
