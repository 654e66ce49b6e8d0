"""One child process of the launcher: its life is tied to ours, its output goes through a ChildLog. Signals go to its pid.

A ChildProcess has it running: a new interpreter, or a fork of the template (template.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from triptych.services.launcher.child_log import ChildLog
from triptych.shared.tied_exec import tied

CHUNK_BYTES = 1 << 16  # chosen: a pipe's capacity
LOG_END_TIMEOUT_S = 2.0  # chosen: grandchildren may keep the pipe open for longer than the child lives


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start. env is the whole environment. descriptors: given to the child, closed here. fork_arguments: arguments of
    the `triptych` command that do what `command` does, for stages that a template can fork."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    fork_arguments: tuple[str, ...] | None = None


class ChildProcess(Protocol):
    """A running process that is our child. returncode is None until it has ended, -N for signal N."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: signal.Signals) -> None: ...


class InheritedProcess:
    """A ChildProcess that somebody else started, and that became our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._reap)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._descriptor)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class Child:
    """A started process. Must be awaited with wait() or stop(), which reap it."""

    def __init__(self, name: str, process: ChildProcess, output: asyncio.StreamReader, log: ChildLog) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._output = output
        self._pump = asyncio.create_task(self._pump_output(), name=f"log of {name}")

    @classmethod
    async def start(cls, spec: ChildSpec, log: ChildLog) -> Child:
        """In a session of its own: a terminal's Ctrl-C is for us, who stop the children in order."""
        process = await asyncio.create_subprocess_exec(
            *tied(*spec.command),
            env=dict(spec.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            pass_fds=spec.descriptors,
        )
        for descriptor in spec.descriptors:
            os.close(descriptor)
        assert process.stdout is not None
        return cls(spec.name, process, process.stdout, log)

    @classmethod
    async def inherit(cls, name: str, pid: int, output: int, log: ChildLog) -> Child:
        """A process that became our child; `output` is the reading end of its output, ours from now on."""
        process = InheritedProcess(pid)
        reader = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return cls(name, process, reader, log)

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
        while chunk := await self._output.read(CHUNK_BYTES):
            self.log.feed(chunk)
        self.log.end()
