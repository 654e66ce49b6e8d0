"""Clients that send no whole request head, or read nothing, lose their connection; slow ones keep it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from support.transport import until
from triptych.shared import http_connection
from triptych.shared.http_host import QuietServer, listening_socket, make_server

WAIT_S = 10.0  # of a loaded machine
NUM_LARGE_BYTES = 8 << 20  # more than the sockets' buffers take
HEAD = b"GET %b HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_connection, "UNREAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_connection, "CHECK_INTERVAL_S", 0.05)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[QuietServer, Callable[[], Awaitable[socket.socket]]]]:
    """A server, and how to connect to it with a small buffer."""
    app = FastAPI()

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * NUM_LARGE_BYTES)

    @app.get("/late")
    async def late() -> StreamingResponse:
        async def content() -> AsyncIterator[bytes]:
            yield b"begun"
            await asyncio.sleep(3 * http_connection.HEAD_TIMEOUT_S)
            yield b"ended"

        return StreamingResponse(content())

    loop = asyncio.get_running_loop()

    async def connect() -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, listener.getsockname())
        return client

    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen()
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server, connect
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, WAIT_S)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((b"",), id="nothing"),
        pytest.param((HEAD % b"/late",), id="half of the first head"),
        pytest.param((HEAD % b"/none" + b"\r\n", HEAD % b"/none"), id="half of the second head"),
        pytest.param((HEAD % b"/large" + b"\r\n",), id="a request, and reads nothing"),
        pytest.param((HEAD % b"/large" + b"Connection: close\r\n\r\n",), id="a last request, and reads nothing"),
    ],
)
async def test_they_are_cut_off(sent: tuple[bytes, ...]) -> None:
    async with served() as (server, connect):
        with await connect() as client:
            await until(lambda: len(server.server_state.connections) == 1, WAIT_S)
            for part in sent:
                await asyncio.get_running_loop().sock_sendall(client, part)
                if part is not sent[-1]:
                    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 4096), WAIT_S)
            await until(lambda: not server.server_state.connections, WAIT_S)


async def test_slow_readers_and_late_answers_are_not() -> None:
    loop = asyncio.get_running_loop()
    async with served() as (_, connect):
        with await connect() as client, await connect() as waiting:
            await loop.sock_sendall(client, HEAD % b"/large" + b"Connection: close\r\n\r\n")
            await loop.sock_sendall(waiting, HEAD % b"/late" + b"Connection: close\r\n\r\n")
            num_bytes, begin_s = 0, loop.time()
            async with asyncio.timeout(WAIT_S):
                while piece := await loop.sock_recv(client, 1 << 18):
                    num_bytes += len(piece)
                    if loop.time() - begin_s < 3 * http_connection.UNREAD_TIMEOUT_S:
                        await asyncio.sleep(0.1)
                late = b""
                while piece := await loop.sock_recv(waiting, 1 << 16):
                    late += piece
            assert num_bytes > NUM_LARGE_BYTES
            assert b"begun" in late
            assert b"ended" in late


class Recorder(asyncio.Transport):
    """sent: what went out, in how many pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.is_closed = False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_what_is_written_in_one_turn_goes_out_together() -> None:
    transport = Recorder()
    writer = http_connection.TurnWriter(transport, asyncio.get_running_loop())
    writer.write(b"head ")
    writer.write(b"body")
    assert transport.sent == []
    await asyncio.sleep(0)
    assert transport.sent == [b"head body"]
    large = bytes(http_connection.MAX_HELD_BYTES + 1)
    writer.write(large)
    assert transport.sent[1:] == [large]  # at once
    writer.write(b"the ")
    writer.write(b"end")
    writer.close()
    assert transport.sent[2:] == [b"the end"]
    writer.write(b"too late")
    await asyncio.sleep(0)
    assert transport.sent[3:] == []
