"""`bench emulated`: what the size of a cluster costs its router, and whether much work leaves anything behind.

Two emulated clusters of A100s, one sixteen times the other, with the same work for each instance. Modelled time runs sixteen
times slower in the large one, so that both have as many requests and steps in a real second, in batches of one size: what
differs is how many instances there are to hear of and to choose from.
"""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
from PIL import Image

from triptych.loadgen.bench.measured_cluster import measured_cluster
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.router_load import Load, RouterUnderTest
from triptych.loadgen.bench.runner import Plan, machine, tell

MODEL, GPU = "qwen2.5-vl-7b", "a100"
PICTURE_SIZE = (448, 448)  # pixels: 256 vision tokens
MAX_CPU_RATIO = 1.2  # the promises, as the next: of the large cluster's router over the small one's
MAX_MEMORY_GROWTH = 0.05  # over 10,000 requests
MEASURED = ("router-0", "emulated-0")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Instances of each stage, and modelled seconds per real second."""

    encoder: int
    prefill: int
    decode: int
    time_scale: float

    @property
    def num_instances(self) -> int:
        return self.encoder + self.prefill + self.decode

    @property
    def options(self) -> tuple[str, ...]:
        """Of `triptych up`. A message for each step: else the clusters' unequal steps would share messages unequally."""
        counts = {"--encoder": self.encoder, "--prefill": self.prefill, "--decode": self.decode}
        given = {"--emulate": GPU, "--time-scale": self.time_scale, "--stream-interval-s": 0, **counts}
        return tuple(str(part) for option in given.items() for part in option)


@dataclass(frozen=True, slots=True)
class Sizes:
    """load_per_decode: requests at a time for each decode instance. num_requests: in one run. The large cluster has num_runs
    after one to warm up, the small one as many as give a median."""

    small: Cluster
    large: Cluster
    load_per_decode: int
    num_requests: int
    num_small_runs: int
    num_runs: int


FULL = Sizes(Cluster(1, 1, 2, 4.8), Cluster(16, 16, 32, 0.3), 4, 1000, 3, 10)
QUICK = Sizes(Cluster(1, 1, 2, 50.0), Cluster(2, 2, 4, 25.0), 4, 24, 1, 1)


async def bench_emulated(plan: Plan) -> Report:
    """Measure both clusters, one after the other.

    Raises:
        BenchFailed, ClusterFailed: something didn't start.
    """
    sizes = QUICK if plan.is_quick else FULL
    conditions = machine() | {
        "model": MODEL,
        "emulated": GPU,
        "requests": sizes.num_runs * sizes.num_requests,
        "requests_per_decode_instance": sizes.load_per_decode,
        "time_scale_small": sizes.small.time_scale,
        "time_scale_large": sizes.large.time_scale,
        "quick": plan.is_quick,
    }
    small = await _measure(sizes.small, sizes, sizes.num_small_runs)
    large = await _measure(sizes.large, sizes, sizes.num_runs)
    sides = {f"instances_{sizes.small.num_instances}": small, f"instances_{sizes.large.num_instances}": large}
    figures = {f"{name}.{side}": measured[name] for name in small for side, measured in sides.items()}
    figures["router_cpu_ratio"] = large["router_cpu_ms"] / small["router_cpu_ms"]
    return Report("emulated", conditions, figures, {} if plan.is_quick else _bars(figures["router_cpu_ratio"], small, large))


def _bars(cpu_ratio: float, small: dict[str, float], large: dict[str, float]) -> dict[str, Bar]:
    growths = {f"{name}_memory_growth": Bar(large[f"{name}_memory_growth"], MAX_MEMORY_GROWTH, True) for name in MEASURED}
    num_lost = small["num_lost"] + large["num_lost"]
    return {"router_cpu_ratio": Bar(cpu_ratio, MAX_CPU_RATIO, True), **growths, "num_lost": Bar(num_lost, 0, True)}


async def _measure(cluster: Cluster, sizes: Sizes, num_runs: int) -> dict[str, float]:
    """Medians over the runs; growth of memory from the first of them to the last."""
    load = Load(sizes.num_requests, sizes.load_per_decode * cluster.decode)
    tell(f"{cluster.num_instances} instances ...")
    async with measured_cluster(MODEL, cluster.options) as (info, http):
        pids: dict[str, int] = info["pids"]
        router = RouterUnderTest(http, str(info["url"]).rstrip("/"), pids["router-0"], _picture())
        runs = [await router.measure(load, may_lose=True)]
        before = _memory_mb(pids)
        for number in range(num_runs):
            tell(f"  {number + 1} of {num_runs} times {load.num_requests} requests, {load.concurrency} at a time ...")
            runs.append(await router.measure(load, may_lose=True))
        after = _memory_mb(pids)
    return {
        "router_cpu_ms": statistics.median(run["cpu_ms"] for run in runs[1:]),
        "requests_per_s": statistics.median(run["requests_per_s"] for run in runs[1:]),
        "router_busy_cores": statistics.median(run["busy_cores"] for run in runs[1:]),
        "num_lost": sum(run["num_lost"] for run in runs),
        **{f"{name}_memory_mb": after[name] for name in MEASURED},
        **{f"{name}_memory_growth": after[name] / before[name] - 1 for name in MEASURED},
    }


def _memory_mb(pids: dict[str, int]) -> dict[str, float]:
    return {name: psutil.Process(pids[name]).memory_info().rss / 1e6 for name in MEASURED}


def _picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", PICTURE_SIZE, "red").save(file, "PNG")
    return file.getvalue()
