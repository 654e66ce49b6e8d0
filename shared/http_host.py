"""The HTTP side of a process: its listening socket, a uvicorn that leaves signals alone, probes that every process has."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.shared.errors import BadRequest
from triptych.shared.http_connection import Connection
from triptych.shared.messages import State
from triptych.shared.metrics import CONTENT_TYPE, exposition

PROBES = ("/live", "/ready", "/health", "/metrics")
KEEP_ALIVE_S = 75  # chosen: longer than a client's pool keeps a connection, so that the server isn't the one to close it
SHUTDOWN_S = 3  # chosen: answers were finished by the drain; what is left are idle or stuck connections
MAX_HEADER_BYTES = 64 * 1024  # chosen: bounds what a client can make us buffer before its headers end


class QuietServer(uvicorn.Server):
    """uvicorn raises captured signals again after serve(), which ends the process before it has drained. Ours doesn't
    capture: run_service handles signals and sets should_exit."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def resolve_host(bind_host: str) -> str:
    """The address to listen on; `hostname` means this host's own.

    Raises:
        BadRequest: it doesn't resolve, or means all interfaces.
    """
    name = socket.gethostname() if bind_host == "hostname" else bind_host
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BadRequest(f"bind_host {bind_host!r} is not an address of this host: {error}", code="bad_setting") from error
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise BadRequest(
            "bind_host must be one address, not all interfaces: `hostname` for this host's own, or one that you name",
            code="bad_setting",
        )
    return address


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound, not yet listening.

    Raises:
        BadRequest: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BadRequest(f"can't listen on {host} port {port}: {error.strerror}; choose another --port", code="port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The http:// URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp) -> QuietServer:
    """A server to run with `serve(sockets=[...])` on the running loop."""
    return QuietServer(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody looks at a client's address
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )


def add_probes(app: FastAPI, state: Callable[[], State], instance_id: str, registry: CollectorRegistry) -> None:
    """/live: the loop turns; /ready: takes work; /health: what it is; /metrics. Those that the app has itself are kept."""
    taken = {getattr(route, "path", "") for route in app.routes}

    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    async def ready() -> JSONResponse:
        return JSONResponse({"status": state()}, status_code=200 if state() == "ready" else 503)

    async def health() -> JSONResponse:
        return JSONResponse({"status": state(), "instance_id": instance_id})

    async def metrics() -> Response:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    for path, endpoint in zip(PROBES, (live, ready, health, metrics), strict=True):
        if path not in taken:
            app.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)


def gate_until_started(app: ASGIApp, state: Callable[[], State]) -> ASGIApp:
    """Answers 503 to everything but probes while the service is starting: its handlers may rely on start()."""

    async def gated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and state() == "starting" and scope["path"] not in PROBES:
            body = {"message": "the server is starting", "type": "server_error", "param": None, "code": "overloaded"}
            response = JSONResponse({"error": body}, status_code=503, headers={"Retry-After": "1"})
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return gated
