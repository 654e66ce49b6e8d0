"""A NATS or Valkey server that a test may kill and start again on its port: the product's own configuration of it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from triptych.services.launcher.embedded import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from triptych.shared.tied_exec import tied

TIMEOUT_S = 20.0


class OwnServer:
    """`await OwnNats.start(folder)`; stop() is idempotent."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start_again(self) -> None:
        spec = self._server.spec()
        command = tied(*spec.command)
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)  # noqa: ASYNC220 - starting takes no time
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._server.wait_ready(self._process.pid)
        except BaseException:
            self.stop()
            raise

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(TIMEOUT_S)


class OwnNats(OwnServer):
    @classmethod
    async def start(cls, folder: Path) -> OwnNats:
        own = cls(EmbeddedNats(folder))
        await own.start_again()
        return own


class OwnValkey(OwnServer):
    @classmethod
    async def start(cls, folder: Path) -> OwnValkey:
        own = cls(EmbeddedValkey(folder))
        await own.start_again()
        return own
