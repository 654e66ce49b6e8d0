"""Bench autoscale: GPU-seconds of a day whose load swings, at 99 % in time: ours beside a monolith that is scaled by the same
rule, and beside as many instances as the peak needs, always.

The same requests for all, on equal emulated instances, by `bench policy`'s replays. The scaler counts what is paid for, from
the moment that an instance is asked for until it is gone.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from triptych.loadgen.bench import keeping_up
from triptych.loadgen.bench.policy_replays import Figures, Found, Part, PolicyBench, Scale, conditions_of, side_by_side
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, tell
from triptych.loadgen.bench.service_counters import heartbeats
from triptych.loadgen.replay.slo import Isolated

TIDES = "tides"
SPENT, THERE = "triptych_instance_seconds", "triptych_replicas"
LOOK_EVERY_S = 1.0  # chosen, real
MIN_ATTAINMENT = 0.99
MAX_RATIOS = {"monolith": 0.85, "always_peak": 0.6}  # the promise: our GPU-seconds over theirs
GPUS_PER_INSTANCE = 1


@dataclass(frozen=True, slots=True)
class Side:
    """A cluster of so many instances at first, and of so many at least and at most."""

    policy: str
    start: int
    least: int
    most: int


# What the peak needs, chosen: more than the fewest with which 99 % of the requests of its 90 seconds are in time too (8,
# simulated with two seeds: known afterwards), fewer than our own rule gives to its load (9 and 2). They may still move, and one
# more may start.
PEAK = 10
SIDES = {
    "triptych": Side("triptych", 3, 2, 24),
    "monolith": Side("monolith", 4, 1, 32),
    "always_peak": Side("triptych", PEAK, PEAK, PEAK + 1),
}
ALONE = Side("monolith", 2, 2, 3)  # who what requests take alone is measured on
ALONE_S = 120.0  # chosen, modelled: requests of all sizes
# Modelled seconds in a real one, measured with five of the morning's minutes on two hyperthreads beside another bench: at 3
# 0.998 were in time, at 4 0.981, at 6 0.972; late were texts, due in 55 real ms then, which waited for the CPU
FULL = Scale({TIDES: Part(1.0, 1500.0)}, 3.0, (1,), tuple(SIDES))
QUICK = Scale({TIDES: Part(1.0, 60.0)}, 20.0, (1,), ("triptych", "monolith"))


@dataclass(slots=True)
class Spending:
    """What one cluster used. instance_s: in real seconds. most_instances: at any moment."""

    found: Found
    instance_s: float
    most_instances: float

    def figures(self, time_scale: float) -> Iterator[tuple[str, float]]:
        """In modelled seconds."""
        yield "gpu_seconds", GPUS_PER_INSTANCE * time_scale * self.instance_s
        yield "most_instances", self.most_instances
        yield from self.found.figures()


async def bench_autoscale(plan: Plan) -> Report:
    """Replay the day against a cluster of each side.

    Raises:
        BenchFailed, ClusterFailed: something didn't start, or a replay did not come to its end.
    """
    scale = QUICK if plan.is_quick else FULL

    async def measured(bench: PolicyBench, name: str) -> Figures:
        async with _cluster(bench, SIDES[name]) as cluster:
            spending = await _spent(bench, name, *cluster)
        tell(f"  {spending}")
        return spending.figures(scale.time_scale)

    figures = await side_by_side(scale, measured, await _isolated(scale))
    sides = {name: f"{side.policy}, {side.least} to {side.most}" for name, side in SIDES.items()}
    conditions = conditions_of(scale, plan) | {"instances": sides, "gpus_per_instance": GPUS_PER_INSTANCE}
    return Report("autoscale", conditions, figures, {} if plan.is_quick else bars(figures))


async def _isolated(scale: Scale) -> Mapping[str, Isolated]:
    """What requests take alone, in a cluster of its own."""
    alone = Scale({TIDES: Part(1.0, ALONE_S)}, scale.time_scale, scale.seeds, (ALONE.policy,))
    with tempfile.TemporaryDirectory() as folder:
        bench = PolicyBench(alone, Path(folder))
        async with _cluster(bench, ALONE) as cluster:
            await bench.replay_all("alone", *cluster)
        return bench.isolated


def _cluster(bench: PolicyBench, side: Side) -> AbstractAsyncContextManager[tuple[dict[str, Any], aiohttp.ClientSession]]:
    """Nobody is told targets, by which late requests would be refused."""
    size = {"instances": side.start, "min_instances": side.least, "max_instances": side.most}
    return bench.cluster(side.policy, **size, slo_ttft_text_s=0, slo_ttft_picture_s=0)


async def _spent(bench: PolicyBench, name: str, info: Mapping[str, Any], http: aiohttp.ClientSession) -> Spending:
    [scaler] = [beat.http_url for beat in await heartbeats(info["nats_url"]) if beat.service == "scaler"]
    before_s, most = (await _read(http, scaler))[SPENT], 0.0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, (await _read(http, scaler))[THERE])
            await asyncio.sleep(LOOK_EVERY_S)

    watching = asyncio.create_task(watch(), name="watch the scaler")
    try:
        [found] = (await bench.replay_all(name, info, http)).values()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    if not watching.cancelled():
        raise BenchFailed(f"the scaler does not tell its metrics: {watching.exception()}")
    return Spending(found, (await _read(http, scaler))[SPENT] - before_s, most)


async def _read(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The scaler's sums over all kinds of instances."""
    async with http.get(f"{url}/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    own = (f"{SPENT}_total", THERE)
    return {name: sum(one.value for one in families[name].samples if one.name in own) for name in (SPENT, THERE)}


def bars(figures: Mapping[str, float]) -> dict[str, Bar]:
    """What is promised of a full run."""
    made = {"attainment_triptych": Bar(figures["attainment_own_scaled.triptych"], MIN_ATTAINMENT)}
    for name, limit in MAX_RATIOS.items():
        ratio = figures["gpu_seconds.triptych"] / figures[f"gpu_seconds.{name}"]
        made[f"gpu_seconds_to_{name}"] = Bar(ratio, limit, is_most=True)
    return made | keeping_up.bar(figures)
