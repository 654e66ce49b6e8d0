"""Two processes that move tensors: this one's transport, and the other one, which obeys orders (see transport.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from support.loopback import handle
from support.transport import PARENT, Frame, Order, PipePlane, pattern
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import PullRequest, TensorRef
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_request, encode

TESTS = Path(__file__).resolve().parents[1]
CAPACITY_BYTES = 80 << 20


class Processes:
    """This process's transport, and the other process."""

    def __init__(self, child: asyncio.subprocess.Process, mode: Any, timeout_s: float) -> None:
        assert child.stdout is not None
        assert child.stdin is not None
        self.child = child
        self.after_pull: Callable[[], None] | None = None
        self.plane = PipePlane(child.stdout, child.stdin, self._handle)
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


@asynccontextmanager
async def two_processes(mode: str, timeout_s: float = 15.0) -> AsyncIterator[Processes]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "support.transport",
        mode,
        str(timeout_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )
    processes = Processes(child, mode, timeout_s)
    await processes.transport.start()
    running = asyncio.create_task(processes.plane.run())
    try:
        await processes.plane.order(Order("usage"), 60.0)  # it imports torch first
        yield processes
    finally:
        await processes.transport.close()
        if child.returncode is None:
            child.kill()
        await child.wait()
        await asyncio.wait_for(running, 5)
        assert child.stdin is not None
        child.stdin.close()
