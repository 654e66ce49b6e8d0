"""Bench policy: policy sets beside each other on equal emulated instances, under bursts of pictures and under hardly any.

The same requests for all, at three seeds, by `loadgen replay`; the latencies that SLOs are factors of are measured once, on the
monolith before its first replay. Sets that schedule by SLO are told it; the others know none and refuse nobody.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from triptych.loadgen.bench import keeping_up
from triptych.loadgen.bench.keeping_up import Effort, Effortmeter
from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S, measured_cluster
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, machine, tell
from triptych.loadgen.replay.conditions import OUTCOMES_FILE
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.run import replay
from triptych.loadgen.replay.slo import CLASSES, Isolated, parse_slos
from triptych.loadgen.report.results import OutcomesReader, make_report
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.workload import load_workload
from triptych.loadgen.traces.shaping import shaped
from triptych.loadgen.traces.trace import MalformedRows, Trace, TraceOptions
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.policies.queueing import fcfs

MODEL, GPU, NUM_INSTANCES = "internvl2.5-26b", "a100", 8
POLICIES = ("monolith", "modserve_decoup", "modserve", "triptych")
SEEDS = (1, 2, 3)
SLO_FACTOR = 5
BURSTS, LIGHT = "bursts", "image-light"
IMAGE_BURSTS_S = ((60.0, 90.0), (150.0, 180.0))  # of workloads/bursts: more requests with pictures, more pictures a request
MAX_TEXT_RATIO = 0.5
MIN_LIGHT_RATIO = 0.98
STREAM_INTERVAL_S = 0.1  # chosen, real: TTFT and the mean TBT of an output don't depend on it, what it costs to emulate does
MAX_PREFILL_TOKENS = 2048  # of a step, chosen for all sets: Sarathi-Serve (arXiv 2403.02310) takes 512 to 2048


@dataclass(frozen=True, slots=True)
class Part:
    """Of a workload: the first duration_s modelled seconds, at so many times its rate."""

    rate: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Scale:
    """time_scale: modelled seconds per real one. policies: the monolith first, it has no use for an SLO."""

    parts: Mapping[str, Part]
    time_scale: float
    seeds: tuple[int, ...]
    policies: tuple[str, ...] = POLICIES


# Chosen. A burst of pictures, of seven tiles each, keeps six instances busy: too much for a monolith, whose texts wait for it,
# not for eight with stages apart. Both of them are over after 180 s. `image-light` keeps two busy, since more requests a second
# than 40 real ones are too much for the control plane on two cores
FULL = Scale({BURSTS: Part(0.85, 180.0), LIGHT: Part(2.5, 60.0)}, 4.0, SEEDS)
QUICK = Scale({BURSTS: Part(1.0, 70.0), LIGHT: Part(1.0, 20.0)}, 10.0, SEEDS[:1], ("monolith", "triptych"))


@dataclass(slots=True)
class Found:
    """Of one set under one workload, all seeds together. burst_text_s: TTFT of its text requests that came in a burst of
    pictures; modelled seconds, as goodput is per modelled second. own_scaled_met: shares in time. efforts: one of each replay.
    """

    burst_text_s: list[float] = field(default_factory=list)
    own_scaled_per_s: list[float] = field(default_factory=list)
    class_wide_per_s: list[float] = field(default_factory=list)
    own_scaled_met: list[float] = field(default_factory=list)
    num_failed: int = 0
    efforts: list[Effort] = field(default_factory=list)

    def figures(self) -> Iterator[tuple[str, float]]:
        if self.burst_text_s:
            yield "text_p99_ttft_in_bursts_s", percentile(self.burst_text_s, 0.99)
        yield "goodput_own_scaled_per_s", statistics.fmean(self.own_scaled_per_s)
        yield "goodput_class_wide_per_s", statistics.fmean(self.class_wide_per_s)
        yield "attainment_own_scaled", statistics.fmean(self.own_scaled_met)
        yield "num_failed", self.num_failed
        yield from keeping_up.figures(self.efforts)


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


async def bench_policy(plan: Plan) -> Report:
    """Replay both workloads against a cluster of each set.

    Raises:
        BenchFailed, ClusterFailed: something didn't start, or a replay did not come to its end.
    """
    scale = QUICK if plan.is_quick else FULL
    found: dict[str, dict[str, Found]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = PolicyBench(scale, Path(folder))
        for policy in scale.policies:
            found[policy] = await bench.measure(policy)
    figures = {
        f"{workload}_{name}.{policy}": value
        for policy, by_workload in found.items()
        for workload, of_policy in by_workload.items()
        for name, value in of_policy.figures()
    }
    promised = {} if plan.is_quick else _bars(figures) | keeping_up.bar(figures)
    return Report("policy", conditions_of(scale, plan), figures, promised)


def conditions_of(scale: Scale, plan: Plan) -> dict[str, object]:
    """What a reader should know of the figures."""
    return machine() | {
        "model": MODEL,
        "emulated": GPU,
        "instances": NUM_INSTANCES,
        "seeds": list(scale.seeds),
        "rates": {workload: part.rate for workload, part in scale.parts.items()},
        "time_scale": scale.time_scale,
        "slo": f"{SLO_FACTOR}x isolated",
        "quick": plan.is_quick,
    }


class PolicyBench:
    """folder: for the results of the replays. isolated: what requests take alone, measured at the first replay unless given."""

    def __init__(self, scale: Scale, folder: Path, isolated: Mapping[str, Isolated] | None = None) -> None:
        self._scale = scale
        self._folder = folder
        self.isolated: Mapping[str, Isolated] = isolated or {}

    async def measure(self, policy: str) -> dict[str, Found]:
        """By workload."""
        async with measured_cluster(MODEL, self.options(policy)) as cluster:
            return await self.replay_all(policy, *cluster)

    async def replay_all(self, policy: str, info: Mapping[str, Any], http: aiohttp.ClientSession) -> dict[str, Found]:
        """By workload, against a cluster of that set (measured_cluster's)."""
        meter = Effortmeter(info, http)
        found = {workload: Found() for workload in self._scale.parts}
        for workload, into in found.items():
            for seed in self._scale.seeds:
                tell(f"{policy}: {workload}, seed {seed} ...")
                before = await meter.read()
                await self._replay(str(info["url"]), workload, seed, into)
                into.efforts.append(Effort.between(before, await meter.read()))
                tell(f"  {into.efforts[-1]}")
        return found

    async def _replay(self, url: str, workload: str, seed: int, into: Found) -> None:
        out = self._folder / f"{workload}-{seed}"
        out.mkdir(exist_ok=True)
        conditions = await replay(self._trace(workload, seed), self._replay_options(url, out, seed), Console(quiet=True))
        if conditions.ended != "complete":
            raise BenchFailed(f"the replay of {workload} did not come to its end: {conditions.message}")
        self.isolated = conditions.isolated
        [whole] = [figures for figures in make_report(out).classes if figures.name == "all"]
        if whole.slo_own_scaled is None or whole.slo_class_wide is None or len(conditions.isolated) < len(CLASSES):
            raise BenchFailed("what requests take alone could not be measured")
        into.own_scaled_per_s.append(whole.slo_own_scaled.goodput_per_s / self._scale.time_scale)
        into.class_wide_per_s.append(whole.slo_class_wide.goodput_per_s / self._scale.time_scale)
        into.own_scaled_met.append(whole.slo_own_scaled.met)
        into.num_failed += sum(whole.errors.values())
        if workload == BURSTS:
            into.burst_text_s += self._text_in_bursts(OutcomesReader(out / OUTCOMES_FILE))

    def _text_in_bursts(self, outcomes: Iterable[RequestOutcome]) -> Iterator[float]:
        """Who was not answered has waited as long as anybody would."""
        scale = self._scale.time_scale
        for outcome in outcomes:
            at_s = outcome.scheduled_s * scale
            if outcome.request_class == "text" and any(begin_s <= at_s < end_s for begin_s, end_s in IMAGE_BURSTS_S):
                is_answered = outcome.error is None and outcome.ttft_s is not None
                yield scale * (outcome.ttft_s or 0.0) if is_answered else scale * REQUEST_TIMEOUT_S

    def options(self, policy: str) -> Sequence[str]:
        """Of `triptych up`."""
        given: dict[str, object] = {"--policy": policy, "--instances": NUM_INSTANCES, "--preprocess": 2}
        given |= {"--emulate": GPU, "--time-scale": self._scale.time_scale, "--max-prefill-tokens": MAX_PREFILL_TOKENS}
        given["--stream-interval-s"] = STREAM_INTERVAL_S
        if policy_set(policy).queue_order is not fcfs:
            targets_s = {name: SLO_FACTOR * isolated.ttft_s for name, isolated in self.isolated.items()}
            given |= {"--slo-ttft-text-s": targets_s["text"], "--slo-ttft-picture-s": targets_s["image"]}
        return [str(part) for option in given.items() for part in option]

    def _trace(self, workload: str, seed: int) -> Trace:
        part = self._scale.parts[workload]
        options = TraceOptions(
            duration_s=part.duration_s,
            text_rate_scale=part.rate,
            image_rate_scale=part.rate,
            speed_up=self._scale.time_scale,
            seed=seed,
        )
        rows = workload_rows(msgspec.structs.replace(load_workload(workload), seed=seed))
        return Trace(workload, "workload", shaped(rows, options), MalformedRows())

    def _replay_options(self, url: str, out: Path, seed: int) -> ReplayOptions:
        return ReplayOptions(
            target=url.rstrip("/"),
            out=out,
            send=SendOptions(seed=seed),
            timeout_s=REQUEST_TIMEOUT_S,
            slos=parse_slos([f"ttft={SLO_FACTOR}x,tbt={SLO_FACTOR}x"]),
            isolated=self.isolated,
        )


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
