"""Two processes that move tensors: this one's transport, and the other one, which obeys orders (see transport.py).

The other one is forked from a process that has imported torch: that takes longer than most of these tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support.loopback import handle
from support.transport import PARENT, Frame, Order, SocketPlane, pattern
from triptych.services.launcher.child import ChildSpec, InheritedProcess
from triptych.services.launcher.template import Template
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import PullRequest, TensorRef
from triptych.shared.tied_exec import tied
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_request, encode

TESTS = Path(__file__).resolve().parents[1]
CAPACITY_BYTES = 80 << 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Processes:
    """This process's transport, and the other process."""

    def __init__(self, child: InheritedProcess, streams: Streams, mode: Any, timeout_s: float) -> None:
        self.child = child
        self.after_pull: Callable[[], None] | None = None
        self.plane = SocketPlane(*streams, self._handle)
        self.transport = InstanceTransport(PARENT, self.plane, "127.0.0.1", CAPACITY_BYTES, mode, timeout_s)

    async def _handle(self, frame: Frame) -> bytes | None:
        reply = await handle(self.transport, frame.payload)
        if self.after_pull is not None and isinstance(decode_request(frame.payload), PullRequest):
            self.after_pull()
        return encode(reply) if reply is not None else None

    async def put(self, num_bytes: int, dtype: str = "uint8", do: str = "put") -> tuple[TensorRef, TransportAddress]:
        """A tensor that the child owns."""
        done = await self.plane.order(Order(do, num_bytes=num_bytes, dtype=dtype))
        assert done.ref is not None
        assert done.address is not None
        return done.ref, done.address

    async def check(self, num_bytes: int = 1000, dtype: str = "uint8", timeout_s: float = 20.0) -> None:
        """One whole pull from the child."""
        ref, address = await self.put(num_bytes, dtype)
        pulled = await self.transport.pull(ref, address, timeout_s)
        assert pulled.dtype == getattr(torch, dtype)
        assert torch.equal(pulled.view(torch.uint8), pattern(num_bytes, dtype).view(torch.uint8))

    async def child_is_empty(self) -> None:
        async with asyncio.timeout(5):
            while (await self.plane.order(Order("usage"))).numbers[::2][:2] != (0, 0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.child.send_signal(number)


class PeerTemplate(Template):
    """Of the other process."""

    def spec(self) -> ChildSpec:
        """The product's template has more to import."""
        spec = super().spec()
        return replace(spec, command=(sys.executable, "-m", "support.transport", *spec.command[-2:]))


@contextmanager
def peer_template() -> Iterator[PeerTemplate]:
    template = PeerTemplate({**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"})
    spec = template.spec()
    with subprocess.Popen(tied(*spec.command), env=spec.env, pass_fds=spec.descriptors) as process:
        for descriptor in spec.descriptors:
            os.close(descriptor)
        yield template
        template.close()
        process.wait(10)


@asynccontextmanager
async def two_processes(template: PeerTemplate, mode: str, timeout_s: float = 15.0) -> AsyncIterator[Processes]:
    ours, theirs = socket.socketpair()
    with theirs:
        spec = ChildSpec("peer", (), dict(os.environ), fork_arguments=(mode, str(timeout_s)))
        child = InheritedProcess(await template.fork(spec, theirs.fileno()))
    reader, writer = await asyncio.open_connection(sock=ours)
    processes = Processes(child, (reader, writer), mode, timeout_s)
    await processes.transport.start()
    running = asyncio.create_task(processes.plane.run())
    try:
        await processes.plane.order(Order("usage"))
        yield processes
    finally:
        await processes.transport.close()
        if child.returncode is None:
            processes.kill()
        await child.wait()
        await asyncio.wait_for(running, 5)
        writer.close()
