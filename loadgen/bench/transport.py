"""Bench transport: tensors from another process into a given one, beside the plainest way to move as many bytes: shared
memory beside a memcpy between warm buffers, Gloo beside a loopback socket (its clock starts at the first byte).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import torch

from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, Side, alternate, machine
from triptych.loadgen.bench.transport_peer import Control, Held, Order, Put, Send, read_frame, write_frame
from triptych.loadgen.child_process import wait_or_kill
from triptych.shared.errors import from_wire
from triptych.shared.messages import ErrorReply, InstanceId, Message, Reply
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_reply, encode

MEGABYTE = 1 << 20
SIZES_MB = (1, 16, 64)  # chosen: a KV block's, a picture's, a long prompt's
QUICK_SIZES_MB = (1,)
BAR_SIZE_MB = 64
LIMIT = 0.7  # the promise, of the plain way's speed
NUM_WARMUPS = 2  # the first rounds fault pages in
CAPACITY_BYTES = 80 * MEGABYTE  # chosen: one tensor of the largest size
START_TIMEOUT_S = 60.0  # chosen: the peer imports torch
ORDER_TIMEOUT_S = 30.0  # chosen
PLAIN = {"shared_memory": "memcpy", "gloo": "socket"}


class PeerPlane:
    """Implements ControlPlane to the one peer. One order at a time, each answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._writer, self._reader = process.stdin, process.stdout
        self._turn = asyncio.Lock()

    async def order(self, order: Order, timeout_s: float = ORDER_TIMEOUT_S) -> bytes:
        """Raises BenchFailed when the peer is gone or takes too long."""
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                write_frame(self._writer, msgspec.msgpack.encode(order))
                return await read_frame(self._reader)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise BenchFailed(f"the other process of bench transport failed ({type(error).__name__})") from None

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        reply = decode_reply(await self.order(Control(encode(message)), timeout_s))
        if isinstance(reply, ErrorReply):
            raise from_wire(reply.error)
        return reply

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        await self.order(Control(encode(message)))


class Pair:
    """This process's transport, and the peer's tensors."""

    def __init__(self, plane: PeerPlane, mode: Any) -> None:
        self.plane = plane
        self.transport = InstanceTransport(InstanceId("bench-0-bench"), plane, "127.0.0.1", MEGABYTE, mode)

    async def pull_s(self, out: torch.Tensor) -> float:
        """Seconds to pull a tensor of the size of `out` into it."""
        held = msgspec.msgpack.decode(await self.plane.order(Put(out.nbytes)), type=Held)
        began_s = time.perf_counter()
        await self.transport.pull(held.ref, held.address, ORDER_TIMEOUT_S, out=out)
        return time.perf_counter() - began_s

    async def socket_s(self, out: torch.Tensor) -> float:
        """Seconds from the first byte to the last over a plain socket."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(ORDER_TIMEOUT_S)
            receiving = asyncio.create_task(asyncio.to_thread(_receive_s, server, out.numpy().data))
            await self.plane.order(Send(out.nbytes, server.getsockname()[1]))
            return await receiving


def _receive_s(server: socket.socket, view: memoryview) -> float:
    with server.accept()[0] as connection:
        done = connection.recv_into(view[:1])
        began_s = time.perf_counter()
        while done < len(view):
            received = connection.recv_into(view[done:])
            if not received:
                raise BenchFailed("the plain socket was closed early")
            done += received
        return time.perf_counter() - began_s


def _memcpy_s(source: torch.Tensor, out: torch.Tensor) -> float:
    began_s = time.perf_counter()
    np.copyto(out.numpy(), source.numpy())
    return time.perf_counter() - began_s


@contextlib.asynccontextmanager
async def _paired(mode: str) -> AsyncIterator[Pair]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "triptych.loadgen.bench.transport_peer",
        mode,
        str(CAPACITY_BYTES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pair = Pair(PeerPlane(process), mode)
    try:
        await pair.transport.start()
        await pair.plane.order(Put(1), START_TIMEOUT_S)
        yield pair
    finally:
        await pair.transport.close()
        assert process.stdin is not None
        process.stdin.close()
        await wait_or_kill(process, ORDER_TIMEOUT_S)


def _sides(pair: Pair, mode: str, num_bytes: int) -> dict[str, Side]:
    """Ours and the plain one, into the same memory."""
    source, out = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    async def ours() -> dict[str, float]:
        return {"gb_per_s": num_bytes / 1e9 / await pair.pull_s(out)}

    async def plain() -> dict[str, float]:
        spent_s = _memcpy_s(source, out) if mode == "shared_memory" else await pair.socket_s(out)
        return {"gb_per_s": num_bytes / 1e9 / spent_s}

    return {mode: ours, PLAIN[mode]: plain}


async def bench_transport(plan: Plan) -> Report:
    """Measure all sizes over both ways.

    Raises:
        BenchFailed: the other process failed.
    """
    torch.set_num_threads(1)
    conditions = machine() | {"torch": torch.__version__, "runs": plan.runs, "quick": plan.is_quick}
    figures: dict[str, float] = {}
    for mode in PLAIN:
        async with _paired(mode) as pair:
            for size_mb in QUICK_SIZES_MB if plan.is_quick else SIZES_MB:
                medians = await alternate(_sides(pair, mode, size_mb * MEGABYTE), plan.runs, NUM_WARMUPS)
                figures |= {f"gb_per_s_{size_mb}mb.{side}": found["gb_per_s"] for side, found in medians.items()}
    row = f"gb_per_s_{BAR_SIZE_MB}mb"
    pairs = [] if plan.is_quick else [(f"{row}.{mode}", f"{row}.{plain}") for mode, plain in PLAIN.items()]
    bars = {f"{ours}/{plain.split('.')[1]}": Bar(figures[ours] / figures[plain], LIMIT) for ours, plain in pairs}
    return Report("transport", conditions, figures, bars)
