"""The Valkey that a cluster brought along: what tests do to it, and what must hold of what lies in it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from support.cluster import Cluster

PROGRAM = "valkey-server"
MAX_ENTRY_BYTES = 1000  # the acceptance bound: under 1 KB of Redis per block
BATCH_SIZE = 500
LONGEST_HANG_S = 1.5  # a question waits 0.25 s, and after three in vain nobody is asked for 2 s


@dataclass(frozen=True, slots=True)
class Entries:
    """What is there: keys by kind (k: blocks, e: embeddings, f: files), and whom they name as holders."""

    num_by_kind: Counter[str]
    holders: Counter[str]


class IndexServer:
    """Of a running cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        [config] = cluster.temp_dir.rglob("valkey.conf")
        words = dict(line.split(maxsplit=1) for line in config.read_text().splitlines())
        self._url = f"redis://:{words['requirepass']}@127.0.0.1:{words['port']}/0"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Redis]:
        async with Redis.from_url(self._url) as made:
            yield made

    async def flush(self) -> None:
        """Entries and scripts; nothing when it is not there just now."""
        with suppress(RedisError, OSError):
            async with self.client() as client:
                await client.flushall()
                await client.script_flush()

    async def hang(self, rng: random.Random) -> None:
        """Stands still for a while; how long is the fault that is varied."""
        self.stop()
        try:
            await asyncio.sleep(rng.uniform(0.1, LONGEST_HANG_S))
        finally:
            self._send(signal.SIGCONT)

    def stop(self) -> None:
        """It takes what it is sent, and answers nothing."""
        self._send(signal.SIGSTOP)

    def kill(self) -> None:
        """`triptych up` starts it again, empty."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._cluster.pids_of(PROGRAM):
            os.kill(pid, number)

    async def used_bytes(self) -> int:
        """Beside what an empty server takes."""
        async with self.client() as client:
            memory = await client.info("memory")
            return int(memory["used_memory"] - memory["used_memory_startup"])

    async def check(self) -> Entries:
        """Every key ends some day, and none takes 1 KB."""
        num_by_kind: Counter[str] = Counter()
        holders: Counter[str] = Counter()
        async with self.client() as client:
            names = [name async for name in client.scan_iter(count=1000)]
            for begin in range(0, len(names), BATCH_SIZE):
                batch = names[begin : begin + BATCH_SIZE]
                async with client.pipeline(transaction=False) as pipeline:
                    for name in batch:
                        pipeline.ttl(name).memory_usage(name).get(name)
                    told = await pipeline.execute()
                for name, ttl_s, num_bytes, value in zip(batch, told[::3], told[1::3], told[2::3], strict=True):
                    if value is None:  # it has just ended
                        continue
                    assert ttl_s >= 0, f"{name!r} never ends"
                    assert num_bytes < MAX_ENTRY_BYTES, f"{name!r} takes {num_bytes} bytes"
                    kind = name.split(b":", 2)[2][:1].decode()
                    num_by_kind[kind] += 1
                    if kind != "f":
                        holders.update(msgspec.msgpack.decode(value)[::2])
        return Entries(num_by_kind, holders)
