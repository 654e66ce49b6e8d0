"""Bench latency: what the processes cost a request. A client's TTFT through a real cluster beside that of the same engine
called in this process, where the time goes stage by stage, and what a text request costs the router.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.loadgen.bench.latency_sides import ClusterSide, EngineSide, random_question
from triptych.loadgen.bench.measured_cluster import measured_cluster
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.router_load import NUM_TOKENS, Load, RouterUnderTest, stub_stages
from triptych.loadgen.bench.runner import Plan, Side, alternate, machine, tell
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.machine import num_cores

NUM_ENGINE_INSTANCES = 3  # as `triptych up` starts
NUM_WARMUPS = 5  # chosen: connections, transfer pairs, page faults
# The promises, on two cores
OVERHEAD_LIMIT_MS = {"text": 15.0, "picture": 25.0}
ROUTER_CPU_LIMIT_MS = 5.0
ROUTER_LIMIT_PER_S = 200.0

PARTS = ("queued", "transfer", "compute")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many requests: of each kind for latencies, behind real stages and behind stubs of them for the router."""

    num_latency: int
    real: Load
    stub: Load


# 160 at once, chosen: the stubs take a third of a second, so that fewer leave the router idle half of the time
FULL = Sizes(100, Load(60, 4), Load(2000, 160))
QUICK = Sizes(2, Load(4, 2), Load(20, 10))


async def bench_latency(folder: Path, plan: Plan) -> Report:
    """Measure a cluster of the checkpoint in `folder`.

    Raises:
        BenchFailed, ClusterFailed, AnswerFailed: something didn't start, or didn't answer.
    """
    sizes = QUICK if plan.is_quick else FULL
    checkpoint = open_checkpoint(str(folder))
    conditions = machine() | {"model": checkpoint.name, "requests": sizes.num_latency, "quick": plan.is_quick}
    figures: dict[str, float] = {}
    async with measured_cluster(folder) as (info, http):
        url = str(info["url"]).rstrip("/")
        figures |= await _latencies(ClusterSide(http, url), checkpoint, sizes.num_latency)
        router = RouterUnderTest(http, url, int(info["pids"]["router-0"]))
        figures |= await _router(router, info, folder, sizes)
    return Report("latency", conditions, figures, {} if plan.is_quick else _bars(figures))


async def _latencies(cluster: ClusterSide, checkpoint: Checkpoint, num_requests: int) -> dict[str, float]:
    """Medians by kind of request."""
    engine = EngineSide(checkpoint, max(1, num_cores() // NUM_ENGINE_INSTANCES))
    figures: dict[str, float] = {}
    for kind in OVERHEAD_LIMIT_MS:
        tell(f"{num_requests} requests: {kind} ...")
        medians = await alternate(_sides(kind, cluster, engine), num_requests, NUM_WARMUPS)
        figures |= _named(kind, medians["client"], medians["engine_alone"]["ttft_ms"])
    return figures


def _sides(kind: str, cluster: ClusterSide, engine: EngineSide) -> dict[str, Side]:
    rng = random.Random(kind)

    async def client() -> Mapping[str, float]:
        return await cluster.ask(random_question(rng, kind == "picture"))

    async def engine_alone() -> Mapping[str, float]:
        return engine.ask(random_question(rng, kind == "picture"), cluster.num_text_tokens)

    return {"client": client, "engine_alone": engine_alone}


def _named(kind: str, client: Mapping[str, float], engine_ms: float) -> dict[str, float]:
    """The figures of one kind of request."""
    stages = [name.removesuffix("_queued_ms") for name in client if name.endswith("_queued_ms")]
    by_stage = {f"{kind}_{stage}_ms.{part}": client[f"{stage}_{part}_ms"] for stage, part in itertools.product(stages, PARTS)}
    return {
        f"{kind}_ttft_ms.client": client["ttft_ms"],
        f"{kind}_ttft_ms.engine_alone": engine_ms,
        f"{kind}_overhead_ms": client["ttft_ms"] - engine_ms,
        **by_stage,
        f"{kind}_control_plane_ms": client["control_ms"],
        f"{kind}_control_plane_share_of_ttft": client["control_ms"] / client["ttft_ms"],
    }


async def _router(router: RouterUnderTest, info: dict[str, Any], folder: Path, sizes: Sizes) -> dict[str, float]:
    tell(f"{sizes.real.num_requests} requests of {NUM_TOKENS} tokens, real stages ...")
    real = await router.measure(sizes.real)
    async with stub_stages(str(info["nats_url"]), str(folder)):
        tell(f"{sizes.stub.num_requests} requests of {NUM_TOKENS} tokens, stub stages ...")
        await router.measure(QUICK.stub)
        stub = await router.measure(sizes.stub)
    found = {"real_stages": real, "stub_stages": stub}
    return {f"router_{figure}.{stages}": figures[figure] for figure in real for stages, figures in found.items()}


def _bars(figures: Mapping[str, float]) -> dict[str, Bar]:
    """A request is one of 64 tokens, prompt and answer, streamed. The router's own bars are behind stub stages: where real
    ones are slow, each token is a message, and there are few."""
    overheads = {
        f"{kind}_overhead_ms": Bar(figures[f"{kind}_overhead_ms"], limit, is_most=True)
        for kind, limit in OVERHEAD_LIMIT_MS.items()
    }
    return {
        **overheads,
        "router_cpu_ms.stub_stages": Bar(figures["router_cpu_ms.stub_stages"], ROUTER_CPU_LIMIT_MS, is_most=True),
        "router_requests_per_s.stub_stages": Bar(figures["router_requests_per_s.stub_stages"], ROUTER_LIMIT_PER_S),
    }
