"""One child process of the launcher: its life is tied to ours, its output goes through a ChildLog. Signals go to its pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.services.launcher import tied_exec
from triptych.services.launcher.child_log import ChildLog

CHUNK_BYTES = 1 << 16  # chosen: a pipe's capacity
LOG_END_TIMEOUT_S = 2.0  # chosen: grandchildren may keep the pipe open for longer than the child lives


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. env is the whole environment."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]


class Child:
    """A started process. Must be awaited with wait() or stop(), which reap it."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: ChildLog) -> None:
        self.name = spec.name
        self.log = log
        self._process = process
        self._pump = asyncio.create_task(self._pump_output(), name=f"log of {spec.name}")

    @classmethod
    async def start(cls, spec: ChildSpec, log: ChildLog) -> Child:
        """In a session of its own: a terminal's Ctrl-C is for us, who stop the children in order."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(tied_exec.__file__)), str(os.getpid())),
            *spec.command,
            env=dict(spec.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(spec, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit status, -N for signal N. Its last output is in the log when this returns."""
        status = await self._process.wait()
        await asyncio.wait((self._pump,), timeout=LOG_END_TIMEOUT_S)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens when it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after timeout_s."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
        await self.wait()
        self._pump.cancel()

    async def _pump_output(self) -> None:
        output = self._process.stdout
        assert output is not None
        while chunk := await output.read(CHUNK_BYTES):
            self.log.feed(chunk)
        self.log.end()
