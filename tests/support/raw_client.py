"""A chat client on a bare socket, which can go away in the middle of everything."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

IO_TIMEOUT_S = 30.0


class RawClient:
    """An HTTP client that can be as rude as a cut cable: no library finishes the exchange behind our back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def post(cls, url: str, body: dict[str, Any]) -> RawClient:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        payload = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await asyncio.wait_for(writer.drain(), IO_TIMEOUT_S)
        return cls(reader, writer)

    async def read_chunks(self, count: int) -> None:
        """Reads until `count` chunks with text have come."""
        while count:
            line = await asyncio.wait_for(self._reader.readline(), IO_TIMEOUT_S)
            assert line, "the server closed the stream"
            if line.startswith(b"data: "):
                choices = json.loads(line[6:])["choices"]
                count -= bool(choices and choices[0]["delta"].get("content"))

    async def read_line(self, beginning: str) -> None:
        """Reads until a line begins so."""
        while not (line := await asyncio.wait_for(self._reader.readline(), IO_TIMEOUT_S)).startswith(beginning.encode()):
            assert line, "the server closed the stream"

    def cut(self) -> None:
        self._writer.transport.abort()
