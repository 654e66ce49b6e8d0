"""Listening addresses, probes that every process has, and the gate in front of a service that still starts."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from triptych.shared.errors import BadRequest
from triptych.shared.http_host import (
    MAX_HEADER_BYTES,
    add_probes,
    gate_until_started,
    listening_socket,
    make_server,
    resolve_host,
    url_of,
)
from triptych.shared.messages import State


@pytest.mark.parametrize("host", [".".join("0000"), ":" * 2, "no.such.host.invalid"])
def test_hosts_that_are_refused(host: str) -> None:
    with pytest.raises(BadRequest, match="bind_host"):
        resolve_host(host)


def test_hosts_that_are_taken() -> None:
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host("hostname")


def test_a_taken_port_is_a_clear_error() -> None:
    with listening_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(BadRequest, match=f"port {port}"):
            listening_socket("127.0.0.1", port)


async def test_probes_and_gate() -> None:
    app = FastAPI()
    state: list[State] = ["starting"]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"mine": "yes"}

    @app.get("/work")
    async def work() -> dict[str, str]:
        return {"done": "yes"}

    add_probes(app, lambda: state[0], "x-0", CollectorRegistry())
    transport = httpx.ASGITransport(gate_until_started(app, lambda: state[0]))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).json() == {"mine": "yes"}
        refused = await http.get("/work")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["message"] == "the server is starting"
        state[0] = "ready"
        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/work")).json() == {"done": "yes"}
        assert (await http.get("/metrics")).status_code == 200
        state[0] = "draining"
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/work")).status_code == 200


async def test_headers_without_an_end_are_cut_off() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen()
        server = make_server(FastAPI())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * (MAX_HEADER_BYTES + 1))
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
