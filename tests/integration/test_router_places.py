"""When a request gives back its place inside: before its client can know that it is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from support.fake_stages import MODEL, World, write_toy_checkpoint
from triptych.shared.errors import InternalError
from triptych.shared.messages import DecodeRequest


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    write_toy_checkpoint(tmp_path)
    async with World(tmp_path) as world:
        yield world


async def num_inside_at_the_last_event(world: World) -> tuple[bytes, int]:
    """A streamed chat completion by a client that looks as soon as an event is handed to its connection."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    last = (b"", -1)

    async def receive() -> Message:
        if left:
            return left.pop()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal last
        if message.get("body"):
            last = (message["body"], world.router.report().loads[0].num_running)

    headers = [(b"content-type", b"application/json")]
    await world.router.app({**scope, "headers": headers}, receive, send)
    return last


async def test_of_a_stream(world: World) -> None:
    world.add_all()
    event, num_inside = await num_inside_at_the_last_event(world)
    assert event.endswith(b"data: [DONE]\n\n")
    assert num_inside == 0
    await world.settled()


async def test_of_a_stream_that_fails(world: World) -> None:
    stages = world.add_all()

    async def fail(_request: Any) -> Any:
        raise InternalError

    stages["decode"].hooks[DecodeRequest] = fail
    event, num_inside = await num_inside_at_the_last_event(world)
    assert b'"error"' in event
    assert num_inside == 0
    await world.settled()
