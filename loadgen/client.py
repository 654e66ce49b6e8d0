"""A client of the chat API: what the demo and the benchmarks send, and the events that come back."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

TRACE_HEADERS = {"X-Triptych-Trace": "1"}


class AnswerFailed(Exception):
    """A request was refused, or its answer broke off. The text is for the user."""


def chat_body(text: str, pictures: Sequence[bytes], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy streaming request with the usage at its end: PNG pictures as data: URLs, then the text."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}}
        for picture in pictures
    ]
    content.append({"type": "text", "text": text})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON chunks of an event stream.

    Raises:
        AnswerFailed: it is no stream, carried an error, or ended without [DONE].
    """
    if response.status != 200:
        raise AnswerFailed(f"status {response.status}: {(await response.text())[:500]}")
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if line.startswith(b"data: "):
            chunk = json.loads(data)
            if "error" in chunk:
                raise AnswerFailed(chunk["error"]["message"])
            yield chunk
    raise AnswerFailed("the stream broke off")


def brings_token(chunk: dict[str, Any]) -> bool:
    """Whether a chunk brings text, or the end of an answer whose token has none."""
    return any(choice["delta"].get("content") or choice["finish_reason"] for choice in chunk["choices"])


def text_of(chunk: dict[str, Any]) -> str:
    """The piece of the answer that a chunk brings, often none."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
