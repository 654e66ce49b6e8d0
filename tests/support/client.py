"""A strict client of the chat API for tests: it fails on every deviation that a lenient SDK would forgive.

`ask` sends one case and gives what came back; `ask_all` keeps a number of them in flight. Connection errors are raised.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from support.cases import Case


@dataclass(frozen=True, slots=True)
class Answer:
    """status 200 and error None is a complete answer; a stream that broke off has its error frame's object here."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    headers: dict[str, str] | None = None
    trace: dict[str, Any] | None = None
    num_events: int = 0
    seconds: float = 0.0


def session(limit: int = 0, timeout_s: float = 120.0) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit), timeout=aiohttp.ClientTimeout(total=timeout_s), trust_env=False
    )


async def ask(http: aiohttp.ClientSession, url: str, case: Case, *, stream: bool = False, **fields: Any) -> Answer:
    """One chat completion; `fields` go into the body."""
    begin_s = time.monotonic()
    if stream:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    async with http.post(f"{url}/v1/chat/completions", json=case.body(**fields), headers={"X-Triptych-Trace": "1"}) as response:
        if response.status == 200 and stream:
            assert response.content_type == "text/event-stream", response.content_type
            answer = read_events(await response.text())
        else:
            answer = read_json(response.status, await response.text())
        return Answer(
            **{
                **{name: getattr(answer, name) for name in Answer.__slots__},
                "headers": {name.lower(): value for name, value in response.headers.items()},
                "seconds": time.monotonic() - begin_s,
            }
        )


def read_json(status: int, body: str) -> Answer:
    parsed = json.loads(body)
    if status != 200:
        return Answer(status, error=checked_error(parsed))
    assert parsed["object"] == "chat.completion", parsed
    [choice] = parsed["choices"]
    assert choice["message"]["role"] == "assistant"
    return Answer(
        status,
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
        usage=parsed["usage"],
        trace=parsed.get("triptych"),
    )


def read_events(body: str) -> Answer:
    """A whole stream. Every event is one `data:` line (or a comment) and an empty line; the last is [DONE] or an error."""
    texts: list[str] = []
    finish_reason = usage = trace = error = None
    is_done = False
    num_events = 0
    assert body.endswith("\n\n"), f"the stream broke off: ...{body[-200:]!r}"
    for event in body[:-2].split("\n\n"):
        if event.startswith(":"):
            continue
        data = event.removeprefix("event: error\n").removeprefix("data: ")
        assert data != event, f"not an event: {event!r}"
        assert not is_done, f"an event after the end: {event!r}"
        assert error is None or data == "[DONE]", f"an event after the error: {event!r}"
        if data == "[DONE]":
            is_done = True
            continue
        num_events += 1
        chunk = json.loads(data)
        trace = chunk.get("triptych", trace)
        if "error" in chunk:
            error = checked_error(chunk)
            continue
        assert chunk["object"] == "chat.completion.chunk", chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert finish_reason is None, f"a delta after finish_reason: {chunk}"
            texts.append(choice["delta"].get("content") or "")
            finish_reason = choice["finish_reason"]
    assert error is not None or is_done, f"the stream ended without [DONE] and without an error: ...{body[-200:]!r}"
    assert error is None or finish_reason is None, "a stream with an error must not look finished"
    return Answer(200, "".join(texts), finish_reason, usage, error, trace=trace, num_events=num_events)


def checked_error(parsed: Any) -> dict[str, Any]:
    """The OpenAI error object inside; its form is the same for every error."""
    assert set(parsed) == {"error"}, parsed
    error = parsed["error"]
    assert {"message", "type", "param", "code"} <= set(error), error
    assert isinstance(error["message"], str)
    assert len(error["message"]) > 10, error
    assert "Traceback" not in error["message"], error
    assert " object at 0x" not in error["message"], error
    return dict(error)


async def ask_all(url: str, cases: Sequence[Case], concurrency: int, *, streams: bool = True) -> list[Answer]:
    """All answers, in the order of `cases`; every second request streams when `streams`."""
    gate = asyncio.Semaphore(concurrency)

    async def one(http: aiohttp.ClientSession, index: int, case: Case) -> Answer:
        async with gate:
            return await ask(http, url, case, stream=streams and index % 2 == 0)

    async with session() as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(http, index, case)) for index, case in enumerate(cases)]
    return [task.result() for task in tasks]
