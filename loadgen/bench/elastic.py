"""Bench elastic: sets that move their instances beside three that keep them, over a day whose mix drifts and over a steady one.

The same requests for all on equal emulated instances, by `bench policy`; and the scaler's decision log: whether each switch was
explained, and whether instances went to and fro.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from triptych.loadgen.bench import keeping_up
from triptych.loadgen.bench.policy_replays import (
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
from triptych.loadgen.bench.runner import BenchFailed, Plan

DAY, STEADY = "day", "bursts"
SPLITS = ("split_text_first", "split_equal", "split_multimodal_first")
MIN_RATIOS = {"elasticmm": 1.2, "triptych": 1.5}  # the promise: goodput of the day over that of the best split
MIN_STEADY_RATIO = 0.97
RETURN_WITHIN_S = 60.0  # chosen, modelled: an instance that has its old roles back so soon went in vain
ASK_TIMEOUT_S = 120.0  # chosen: a machine that has just emulated eight GPUs
# The first minute of `bursts` is steady. Rates chosen so that the day's peaks are about what eight instances can do.
# Those of torch: chosen
FULL = Scale(
    {DAY: Part(1.5, 1440.0), STEADY: Part(1.0, 60.0)},
    6.0,
    SEEDS,
    (*SPLITS, *MIN_RATIOS),
    torch_parts={DAY: Part(2.0, 180.0, abridged=8.0)},
)
QUICK = Scale(
    {DAY: Part(1.0, 120.0)},
    10.0,
    SEEDS[:1],
    (SPLITS[1], "triptych"),
    torch_parts={DAY: Part(1.0, 10.0, abridged=144.0)},
)


@dataclass(frozen=True, slots=True)
class Moves:
    """Of one cluster: switches of roles that were done, those without reason or figures, and those taken back soon."""

    num_switches: int
    num_unexplained: int
    num_returns: int

    @classmethod
    def of(cls, decisions: Sequence[Mapping[str, Any]], time_scale: float) -> Moves:
        """From the entries of a decision log. time_scale: modelled seconds per real one."""
        switches = [entry for entry in decisions if entry["action"] == "switch" and entry.get("result") == "done"]
        unexplained = [entry for entry in switches if not (entry["reason"] and entry["terms"])]
        by_instance = defaultdict(list)
        for entry in switches:
            by_instance[entry["target"]].append((datetime.fromisoformat(entry["at"]), entry["to"]))
        returns = [
            later
            for moves in by_instance.values()
            for (first, before), (_, _), (later, after) in zip(moves, moves[1:], moves[2:], strict=False)
            if before == after and time_scale * (later - first).total_seconds() < RETURN_WITHIN_S
        ]
        return cls(len(switches), len(unexplained), len(returns))

    def figures(self) -> Iterator[tuple[str, float]]:
        yield "num_switches", self.num_switches
        yield "num_switches_unexplained", self.num_unexplained
        yield "num_switches_taken_back", self.num_returns


async def bench_elastic(plan: Plan, model: Path | None = None) -> Report:
    """Replay both workloads against a cluster of each set; with a checkpoint, the day on a real engine, without bars.

    Raises:
        BenchFailed, ClusterFailed: something didn't start, or a replay did not come to its end.
    """
    scale = (QUICK if plan.is_quick else FULL).on(model)

    async def measured(bench: PolicyBench, policy: str) -> Figures:
        async with bench.cluster(policy) as (info, http):
            found = await bench.replay_all(policy, info, http)
            moves = Moves.of(await _decisions(str(info["nats_url"])), scale.time_scale)
        return itertools.chain(by_workload(found), moves.figures())

    figures = await side_by_side(scale, measured)
    promised = {} if plan.is_quick or model else bars(figures) | keeping_up.bar(figures)
    return Report("elastic", conditions_of(scale, plan), figures, promised)


async def _decisions(nats_url: str) -> list[dict[str, Any]]:
    """The scaler's log, as its users get it."""
    command = (sys.executable, "-m", "triptych.services.cli", "status", "--decisions", "--json", "--nats-url", nats_url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, error = await asyncio.wait_for(process.communicate(), ASK_TIMEOUT_S)
    if process.returncode != 0:
        raise BenchFailed(f"the scaler did not tell its decisions: {error.decode(errors='replace').strip()}")
    return list(json.loads(out)["decisions"])


def bars(figures: Mapping[str, float]) -> dict[str, Bar]:
    """What is promised of a full run."""
    made: dict[str, Bar] = {}
    for policy, min_ratio in MIN_RATIOS.items():
        for workload, limit in ((DAY, min_ratio), (STEADY, MIN_STEADY_RATIO)):
            goodput = f"{workload}_goodput_own_scaled_per_s"
            best = max(figures[f"{goodput}.{split}"] for split in SPLITS)
            made[f"{workload}_goodput_{policy}_to_best_split"] = Bar(figures[f"{goodput}.{policy}"] / best, limit)
        for name in ("num_switches_unexplained", "num_switches_taken_back"):
            made[f"{name}_{policy}"] = Bar(figures[f"{name}.{policy}"], 0.0, is_most=True)
    return made
