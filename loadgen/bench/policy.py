"""Bench policy: policy sets beside each other on equal emulated instances, under bursts of pictures and under hardly any."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from triptych.loadgen.bench import keeping_up
from triptych.loadgen.bench.policy_replays import (
    BURSTS,
    SEEDS,
    Figures,
    Part,
    PolicyBench,
    Scale,
    by_workload,
    conditions_of,
    side_by_side,
)
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import Plan

POLICIES = ("monolith", "modserve_decoup", "modserve", "triptych")
LIGHT = "image-light"
MAX_TEXT_RATIO = 0.5
MIN_LIGHT_RATIO = 0.98
# Chosen. A burst of pictures, of seven tiles each, keeps six instances busy: too much for a monolith, whose texts wait for it,
# not for eight with stages apart. Both of them are over after 180 s. `image-light` keeps two busy, since more requests a second
# than 40 real ones are too much for the control plane on two cores. Those of torch: chosen
FULL = Scale({BURSTS: Part(0.85, 180.0), LIGHT: Part(2.5, 60.0)}, 4.0, SEEDS, POLICIES, torch_parts={BURSTS: Part(2.0, 180.0)})
QUICK = Scale(
    {BURSTS: Part(1.0, 70.0), LIGHT: Part(1.0, 20.0)},
    10.0,
    SEEDS[:1],
    ("monolith", "triptych"),
    torch_parts={BURSTS: Part(1.0, 9.0, abridged=10.0)},
)


async def bench_policy(plan: Plan, model: Path | None = None) -> Report:
    """Replay both workloads against a cluster of each set; with a checkpoint, the bursts on a real engine, without bars.

    Raises:
        BenchFailed, ClusterFailed: something didn't start, or a replay did not come to its end.
    """
    scale = (QUICK if plan.is_quick else FULL).on(model)
    figures = await side_by_side(scale, _measured)
    promised = {} if plan.is_quick or model else _bars(figures) | keeping_up.bar(figures)
    return Report("policy", conditions_of(scale, plan), figures, promised)


async def _measured(bench: PolicyBench, policy: str) -> Figures:
    async with bench.cluster(policy) as cluster:
        return by_workload(await bench.replay_all(policy, *cluster))


def _bars(figures: Mapping[str, float]) -> dict[str, Bar]:
    text = "bursts_text_p99_ttft_in_bursts_s"
    bars = {
        f"text_p99_in_bursts_{policy}_to_monolith": Bar(
            figures[f"{text}.{policy}"] / figures[f"{text}.monolith"], MAX_TEXT_RATIO, is_most=True
        )
        for policy in ("modserve", "triptych")
    }
    goodput = "bursts_goodput_own_scaled_per_s"
    for lower, higher in itertools.pairwise(POLICIES):
        ratio = figures[f"{goodput}.{higher}"] / figures[f"{goodput}.{lower}"]
        bars[f"goodput_{higher}_to_{lower}"] = Bar(ratio, 1.0)
    light = "image-light_goodput_own_scaled_per_s"
    bars["image_light_triptych_to_monolith"] = Bar(figures[f"{light}.triptych"] / figures[f"{light}.monolith"], MIN_LIGHT_RATIO)
    return bars
