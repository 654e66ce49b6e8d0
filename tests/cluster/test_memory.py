"""10,000 requests of which no two are alike leave the memory of every process, and of Redis, as it was after the first ones."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from PIL import Image

from support.client import session
from support.cluster import Cluster
from support.index_server import MAX_ENTRY_BYTES, IndexServer
from support.watch import Watch

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NUM_REQUESTS = 10_000  # the acceptance list's number; every second one has a picture
NUM_WARMUP_REQUESTS = 3_000  # chosen: until all pools are full, and the first entries of the index have ended
SAMPLE_EVERY = 500
CONCURRENCY = 16
TIME_SCALE = 1000
# Small pools, which are full after a few hundred requests: a block of this model has 0.9 MB of KV, a picture 115 kB.
ENV = {
    "TRIPTYCH_KV_CACHE_BYTES": str(400 << 20),
    "TRIPTYCH_EMBEDDING_CACHE_BYTES": str(8 << 20),
    "TRIPTYCH_CACHE_TTL_S": "10",
}
# Chosen: 7 MB over all measured requests. The router goes on to fill its table of known files (20,000, of 0.5 KB each).
MAX_SLOPE_BYTES = 1024


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Cluster]:
    args = ["--emulate", "a100", "--time-scale", str(TIME_SCALE), "--encoder", "2", "--prefill", "2", "--decode", "2"]
    cluster = Cluster(Path("qwen2.5-vl-7b"), tmp_path / "run", args, ENV)
    yield cluster
    assert cluster.stop() == 0


def body(index: int) -> dict[str, Any]:
    rng = random.Random(index)
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{index} " + " ".join(rng.choices("abcdefgh", k=60))}]
    if index % 2:
        file = io.BytesIO()
        Image.new("RGB", (112, 112), (index % 256, index // 256, rng.randrange(256))).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "ignore_eos": True, "temperature": 0}


async def ask_for(http: aiohttp.ClientSession, url: str, indices: range) -> None:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int) -> None:
        async with places, http.post(f"{url}/v1/chat/completions", json=body(index)) as response:
            assert response.status == 200, await response.text()
            await response.read()

    async with asyncio.TaskGroup() as group:
        for index in indices:
            group.create_task(one(index))


def own_bytes(cluster: Cluster) -> dict[str, int]:
    """What each process has for itself alone (USS), by pid and name."""
    return {f"{process.pid} {_name(process)}": int(process.memory_full_info().uss) for process in cluster.processes()}


def _name(process: psutil.Process) -> str:
    return " ".join(Path(word).name for word in process.cmdline()[:5])[-60:]


async def test_of_distinct_requests_is_flat(emulated: Cluster) -> None:
    index = IndexServer(emulated)
    counts: list[int] = []
    samples: list[dict[str, int]] = []
    redis_bytes: list[int] = []
    async with session() as http, Watch(emulated.nats_url) as watch:
        for begin in range(0, NUM_REQUESTS, SAMPLE_EVERY):
            await ask_for(http, emulated.url, range(begin, begin + SAMPLE_EVERY))
            if begin >= NUM_WARMUP_REQUESTS:
                counts.append(begin + SAMPLE_EVERY)
                samples.append(own_bytes(emulated))
                redis_bytes.append(await index.used_bytes())
                total = sum(samples[-1].values())
                print(f"after {counts[-1]}: {total >> 20} MiB in {len(samples[-1])} processes, Redis {redis_bytes[-1]} bytes")
        await watch.until_at_rest(10, "after all requests")
        await watch.until_checked()
        pools = [(beat.instance_id, beat.resources.kv_prefixes, beat.resources.embeddings) for beat in watch.living().values()]
    assert all(sample.keys() == samples[0].keys() for sample in samples), "a process ended"
    slopes = {name: statistics.linear_regression(counts, [one[name] for one in samples]).slope for name in samples[0]}
    for name, slope in slopes.items():
        print(f"{slope:7.1f} bytes a request: {samples[0][name] >> 10} to {samples[-1][name] >> 10} KiB, {name}")
    entries = await index.check()
    print(f"Redis: {redis_bytes} bytes, {dict(entries.num_by_kind)}; pools: {pools}")
    assert max(slopes.values()) < MAX_SLOPE_BYTES
    assert statistics.linear_regression(counts, redis_bytes).slope < MAX_SLOPE_BYTES / 10
    assert redis_bytes[-1] < MAX_ENTRY_BYTES * sum(entries.num_by_kind.values())
