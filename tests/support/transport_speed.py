"""How fast the transport is beside the plainest way: `cd tests && python -m support.transport_speed`, one JSON line.

Between two processes, 64 MB into a given tensor: shared memory against a warm memcpy, Gloo against a raw loopback socket.
Rounds alternate, so that a busy machine hurts both; medians are compared, and the best
rounds, which a busy machine hurts least.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import time

import numpy as np
import torch

from support.transport import Order
from support.transport_processes import Processes, two_processes
from triptych.shared.messages import TransportAddress

NUM_BYTES = 64 << 20
NUM_ROUNDS = 15


async def pull_s(processes: Processes, out: torch.Tensor) -> float:
    ref, address = await processes.put(NUM_BYTES)
    begin_s = time.perf_counter()
    await processes.transport.pull(ref, address, 30.0, out=out)
    return time.perf_counter() - begin_s


async def raw_socket_s(processes: Processes, out: torch.Tensor) -> float:
    """From the first byte to the last."""
    view = memoryview(out.numpy())

    def receive() -> float:
        with server, server.accept()[0] as connection:
            done = connection.recv_into(view[:1])
            begin_s = time.perf_counter()
            while done < NUM_BYTES:
                done += connection.recv_into(view[done:])
            return time.perf_counter() - begin_s

    server = socket.create_server(("127.0.0.1", 0))
    received = asyncio.create_task(asyncio.to_thread(receive))
    address = TransportAddress("", "", "127.0.0.1", server.getsockname()[1])
    await processes.plane.order(Order("raw_send", address=address, num_bytes=NUM_BYTES))
    return await received


def memcpy_s(source: torch.Tensor, out: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    np.copyto(out.numpy(), source.numpy())
    return time.perf_counter() - begin_s


async def compare(mode: str) -> dict[str, float]:
    source, out = torch.ones(NUM_BYTES, dtype=torch.uint8), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    ours: list[float] = []
    plain: list[float] = []
    async with two_processes(mode) as processes:
        for round_ in range(NUM_ROUNDS + 2):
            one, other = await pull_s(processes, out), 0.0
            other = memcpy_s(source, out) if mode == "shared_memory" else await raw_socket_s(processes, out)
            if round_ >= 2:  # the first ones fault pages in
                ours.append(one)
                plain.append(other)
    gb = NUM_BYTES / 1e9
    return {
        "gb_per_s": gb / statistics.median(ours),
        "plain_gb_per_s": gb / statistics.median(plain),
        "ratio": statistics.median(plain) / statistics.median(ours),
        "ratio_of_best": min(plain) / min(ours),
    }


async def main() -> None:
    results = {mode: await compare(mode) for mode in ("shared_memory", "gloo")}
    rounded = {mode: {name: round(value, 2) for name, value in result.items()} for mode, result in results.items()}
    sys.stdout.write(json.dumps(rounded | {"load": os.getloadavg()[0]}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
