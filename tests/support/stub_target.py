"""A chat server that costs next to nothing: it says what a test wants it to say. Bare asyncio, so that it can be faster than
what is tested with it; `python -m support.stub_target` is the same in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

MODEL = "stub"
TOKENS_PER_WORD, TOKENS_PER_REQUEST, PIXELS_PER_TOKEN = 1.5, 10, 784
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """texts: a chunk each, gap_s apart, the first after delay_s; then event, if any. ending: how the stream ends; hang: never;
    late: it is done, but its body never ends. location: where a redirect leads."""

    texts: Sequence[str] = ("hello ", "you")
    delay_s: float = 0.0
    gap_s: float = 0.0
    event: bytes = b""
    ending: Literal["done", "cut", "no_done", "error_event", "hang", "late"] = "done"
    status: int = 200
    location: str = ""
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 10, "completion_tokens": 2})


@dataclass(frozen=True, slots=True)
class Received:
    """at_s: on time.perf_counter()."""

    at_s: float
    headers: str
    body: dict[str, Any]


def prompt_tokens(body: dict[str, Any]) -> int:
    """As this server counts them."""
    count = float(TOKENS_PER_REQUEST)
    for message in body["messages"]:
        content = message["content"]
        parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            if part["type"] == "text":
                count += TOKENS_PER_WORD * len(part["text"].split())
            else:
                head = base64.b64decode(part["image_url"]["url"].partition("base64,")[2][:32])
                width, height = struct.unpack(">II", head[16:24])
                count += width * height / PIXELS_PER_TOKEN
    return round(count)


def counting(*texts: str) -> Callable[[dict[str, Any]], Reply]:
    """Replies of these texts, with usage."""

    def reply(body: dict[str, Any]) -> Reply:
        return Reply(texts, usage={"prompt_tokens": prompt_tokens(body), "completion_tokens": len(texts)})

    return reply


class StubTarget:
    """`async with StubTarget(reply) as stub`. reply: of each body. received: all requests so far; num_cut: connections that the
    client closed in the middle of an answer."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply] | None = None, port: int = 0) -> None:
        self.reply = reply or counting("hello ", "you")
        self.models: list[dict[str, Any]] = [{"id": MODEL, "object": "model"}]
        self.received: list[Received] = []
        self.num_cut = 0
        self.news = asyncio.Event()
        self._port = port
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, self._connections), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.die()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def die(self) -> None:
        """As a killed process: nothing listens any more, every connection is cut."""
        self._server.close()
        for connection in list(self._connections):
            connection.cut()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Waits until something that changes with requests and connections holds."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self.news.clear()
                await self.news.wait()

    def answer(self, connection: _Connection, head: bytes, body: bytes) -> None:
        """Called for each request."""
        if head.startswith(b"GET /v1/models"):
            connection.send_json({"object": "list", "data": self.models})
        elif head.startswith(b"GET /version"):
            connection.send_json({"version": "1.2.3"})
        else:
            parsed = json.loads(body)
            self.received.append(Received(time.perf_counter(), head.decode(), parsed))
            connection.stream(self.reply(parsed))
        self.news.set()


class _Connection(asyncio.Protocol):
    def __init__(self, stub: StubTarget, connections: set[_Connection]) -> None:
        self._stub = stub
        self._connections = connections
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._stub.num_cut += 1
        self._stub.news.set()

    def cut(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) >= size:
            head, body = bytes(self._buffer[:end]), bytes(self._buffer[end + 4 : size])
            del self._buffer[:size]
            self._stub.answer(self, head, body)

    def send_json(self, content: object, status: int = 200, location: str = "") -> None:
        body = json.dumps(content).encode()
        more = f"Location: {location}\r\n" if location else ""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}Content-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def stream(self, reply: Reply) -> None:
        if reply.status != 200:
            self.send_json({"error": {"message": f"refused with {reply.status}", "type": "x"}}, reply.status, reply.location)
            return
        first = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head + _framed(first))
        self._wait(reply.delay_s, reply, 0)

    def _wait(self, delay_s: float, reply: Reply, number: int) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._next, reply, number)

    def _next(self, reply: Reply, number: int) -> None:
        if number < len(reply.texts):
            delta = {"index": 0, "delta": {"content": reply.texts[number]}, "finish_reason": None}
            event = {"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [delta]}
            self._transport.write(_framed(b"data: " + json.dumps(event).encode() + b"\n\n"))
            self._wait(reply.gap_s, reply, number + 1)
        else:
            self._transport.write(_framed(reply.event) if reply.event else b"")
            if reply.ending != "hang":
                self._timer = None
                self._end(reply)

    def _end(self, reply: Reply) -> None:
        if reply.ending == "cut":
            self._transport.abort()
            return
        ending = b""
        if reply.ending == "error_event":
            ending = _framed(b'data: {"error":{"message":"it broke","code":"instance_lost"}}\n\n')
        elif reply.usage is not None:
            ending = _framed(b"data: " + json.dumps({"choices": [], "usage": reply.usage}).encode() + b"\n\n")
        if reply.ending in ("done", "late"):
            ending += _framed(b"data: [DONE]\n\n")
        self._transport.write(ending + (b"" if reply.ending == "late" else b"0\r\n\r\n"))


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(reply: Reply) -> None:
    async with StubTarget(lambda _: reply) as stub:
        print(stub.url, flush=True)
        while True:
            await asyncio.sleep(1.0)
            stub.received.clear()


def main() -> None:
    """Prints its URL; ends when it is killed."""
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--gap-s", type=float, default=0.02)
    options = parser.parse_args()
    usage = {"prompt_tokens": 100, "completion_tokens": options.chunks}
    reply = Reply(["word "] * options.chunks, options.gap_s, options.gap_s, usage=usage)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(reply))


if __name__ == "__main__":
    main()
