"""Pings of a stream: one after each silence of ping_interval_s, counted from the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from triptych.services.router.sse import PING, EventStream

PING_INTERVAL_S = 0.1


async def test_a_ping_comes_ping_interval_s_after_the_last_event() -> None:
    sent: list[bytes] = []
    is_pinged = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.5 * PING_INTERVAL_S)
        late = asyncio.create_task(mark())
        yield b"event"
        await asyncio.wait_for(is_pinged.wait(), 10)
        await late

    async def mark() -> None:
        await asyncio.sleep(1.2 * PING_INTERVAL_S)
        sent.append(b"mark")

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == PING:
            is_pinged.set()

    async def receive() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    closed = asyncio.Event()

    async def close() -> None:
        closed.set()

    await EventStream(events(), 10, PING_INTERVAL_S, close)({"type": "http"}, receive, send)
    assert closed.is_set()
    assert sent[:4] == [b"", b"event", PING, b"mark"], sent
