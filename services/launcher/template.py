"""The launcher's side of fork_template.py: keeps one template process, and has it fork stages.

Where there is no template (not Linux, or it has just died) a stage is started as a new interpreter, only slower.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys

import msgspec

from triptych.services.launcher import fork_template
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.fork_template import MAX_REQUEST_BYTES, ForkRequest

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
FORK_TIMEOUT_S = 60.0  # chosen: the first fork waits for the imports, 5 s of CPU on a machine that may be busy
IS_SUPPORTED = sys.platform == "linux"


class NoTemplateError(Exception):
    """The template can't fork now."""


class Template:
    """env: what the imports need to see, thread counts above all."""

    name = "template"

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def spec(self) -> ChildSpec:
        """How to start it (again), with a control socket of its own."""
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        descriptor = theirs.detach()
        command = (sys.executable, "-m", fork_template.__name__, str(descriptor), str(os.getpid()))
        return ChildSpec(self.name, command, self._env, (descriptor,))

    async def fork(self, spec: ChildSpec, output: int) -> int:
        """Start spec as a fork that writes to descriptor `output`; its pid. It is our child.

        Raises:
            NoTemplateError: the template is gone, or too slow, or spec is too large to be told.
        """
        request = msgspec.json.encode(ForkRequest(spec.name, spec.fork_arguments or (), dict(spec.env)))
        if len(request) > MAX_REQUEST_BYTES:
            raise NoTemplateError
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S), self._lock:
                answer = await self._ask(request, output)
        except (OSError, TimeoutError) as error:
            raise NoTemplateError from error
        if not answer:
            self.close()
            raise NoTemplateError
        return int(answer)

    async def _ask(self, request: bytes, output: int) -> bytes:
        control = self._control
        if control is None:
            raise NoTemplateError
        try:
            socket.send_fds(control, [request], [output])
            return await asyncio.get_running_loop().sock_recv(control, 64)
        except BaseException:  # cancelled too: an answer that comes late would be taken for the next one's
            if control is self._control:
                self.close()
            raise

    def close(self) -> None:
        """The template ends when its socket is closed."""
        if self._control is not None:
            self._control.close()
            self._control = None
