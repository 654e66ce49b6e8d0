"""One request to any OpenAI-compatible server; its answer is read as it streams in. However it ends, the stream says so."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from triptych.loadgen.replay.content import Message
from triptych.loadgen.replay.outcome import CANCELLED, NO_SOCKET
from triptych.loadgen.replay.stream import MAX_TOLD_CHARS, AnswerStream
from triptych.loadgen.replay.target import Target, read_at_most
from triptych.loadgen.replay.words import Piece
from triptych.loadgen.undecodable import UNDECODABLE

CONNECT_TIMEOUT_S = 10.0  # chosen: a healthy server accepts at once
KEEPALIVE_S = 4.0  # chosen: less than uvicorn's 5 s, so that no request meets a connection that the server is closing
LARGE_BODY_BYTES = 1 << 20  # over which aiohttp wants a file, which it sends in parts
MAX_ERROR_BYTES = 4096  # read of an error's body
NO_SOCKET_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)  # of this machine: not the target's fault
END_TIMEOUT_S = 1.0  # chosen: a body that goes on after a refusal or after [DONE] isn't waited for any longer


def client_session(headers: dict[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """As many connections as there are requests at once: what waits shall wait in the server, where it is measured."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class Clock:
    """Seconds since `start`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._began_s


class Exchange:
    """Asks the target's model. Chunks are stamped with `clock`."""

    def __init__(self, http: aiohttp.ClientSession, target: Target) -> None:
        self.clock = Clock()
        self._http = http
        self._url = f"{target.url}/v1/chat/completions"
        options = b'"temperature":0,"stream":true,"stream_options":{"include_usage":true},"messages":['
        self._head = b'{"model":%b,%b' % (json.dumps(target.model).encode(), options)

    async def ask(self, history: Sequence[Piece], message: Message, stream: AnswerStream, cut_after: int | None = None) -> None:
        """cut_after: the client goes away after so many chunks with content."""
        forced = b',"ignore_eos":true' if message.is_forced else b""
        tail = b'],"max_tokens":%d%b}' % (message.max_tokens, forced)
        body = b"".join((self._head, *history, *message.pieces, tail))
        has_begun = False
        try:
            data = body if len(body) < LARGE_BODY_BYTES else io.BytesIO(body)
            async with self._http.post(self._url, data=data, allow_redirects=False) as response:
                has_begun = True
                await self._read(response, stream, cut_after)
        except aiohttp.ConnectionTimeoutError:
            stream.fail("connection", f"no connection within {CONNECT_TIMEOUT_S:.0f} s")
        except TimeoutError:
            stream.fail("timeout", "no whole answer in time")
        except (aiohttp.ClientError, OSError) as error:
            is_ours = isinstance(error, OSError) and error.errno in NO_SOCKET_ERRNOS
            kind = NO_SOCKET if is_ours else "broken_stream" if has_begun else "connection"
            stream.fail(kind, str(error) or type(error).__name__)

    async def _read(self, response: aiohttp.ClientResponse, stream: AnswerStream, cut_after: int | None) -> None:
        if response.status != 200:
            stream.fail(f"http_{response.status}", await _told(response))
            return
        if response.content_type != "text/event-stream":
            stream.fail("broken_stream", f"{response.content_type} where text/event-stream was asked for")
            response.close()
            return
        while not stream.is_done and (data := await response.content.readany()):
            stream.feed(data, self.clock())
            if cut_after is not None and stream.num_chunks >= cut_after and not stream.is_done:
                stream.fail(CANCELLED, "")
            if stream.error is not None:
                response.close()
                return
        if not stream.is_done:
            stream.fail("broken_stream", "the stream ended without [DONE]")
            return
        with contextlib.suppress(OSError, aiohttp.ClientError):  # a body read to its end leaves the connection for others
            async with asyncio.timeout(END_TIMEOUT_S):
                while await response.content.readany():
                    pass


async def _told(response: aiohttp.ClientResponse) -> str:
    """The message of OpenAI's error object, or what else there is."""
    if "Location" in response.headers:
        return f"redirects to {response.headers['Location']}"[:MAX_TOLD_CHARS]
    body = b""
    with contextlib.suppress(OSError, aiohttp.ClientError):  # TimeoutError is one of the former
        async with asyncio.timeout(END_TIMEOUT_S):
            body = await read_at_most(response, MAX_ERROR_BYTES)
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (*UNDECODABLE, KeyError, TypeError):
        message = body.decode(errors="replace")
    return str(message)[:MAX_TOLD_CHARS]
