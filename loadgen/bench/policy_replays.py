"""Policy sets beside each other on equal instances: the replays that `bench policy`, `elastic` and `autoscale` are made of.

The same requests for all, at several seeds, by `loadgen replay`; what SLOs are factors of is measured once, before the first
replay. Sets that schedule by SLO are told it; the others know none and refuse nobody.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from triptych.loadgen.bench import keeping_up
from triptych.loadgen.bench.keeping_up import Effort, Effortmeter
from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S, measured_cluster
from triptych.loadgen.bench.runner import BenchFailed, Plan, machine, tell
from triptych.loadgen.replay.conditions import OUTCOMES_FILE, Conditions
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.run import replay
from triptych.loadgen.replay.slo import CLASSES, Isolated, parse_slos
from triptych.loadgen.report.results import OutcomesReader, make_report
from triptych.loadgen.synth.workload import load_workload
from triptych.loadgen.traces.open import workload_trace
from triptych.loadgen.traces.trace import Trace, TraceOptions
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.policies.queueing import fcfs

MODEL, GPU, NUM_INSTANCES = "internvl2.5-26b", "a100", 8
NUM_TORCH_INSTANCES = 4  # chosen: of processes that share two cores
SEEDS = (1, 2, 3)
SLO_FACTOR = 5
BURSTS = "bursts"
IMAGE_BURSTS_S = ((60.0, 90.0), (150.0, 180.0))  # of workloads/bursts: more requests with pictures, more pictures a request
STREAM_INTERVAL_S = 0.1  # chosen, real: TTFT and the mean TBT of an output don't depend on it, what it costs to emulate does
MAX_IMAGES = 9  # of a request: of 13 tiles, so of 3,328 tokens, at most, of which no more fit in the model's context of 32,768
MAX_PREFILL_TOKENS = 2048  # of a step, chosen for all sets: Sarathi-Serve (arXiv 2403.02310) takes 512 to 2048


@dataclass(frozen=True, slots=True)
class Part:
    """Of a workload: the first duration_s modelled seconds, at so many times its rate. abridged: of a copy that takes so much
    less time for the same shape, with as many requests a second."""

    rate: float
    duration_s: float
    abridged: float = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """What the instances of a cluster are. gpu: which one is emulated; None: they compute, in real time."""

    model: str
    gpu: str | None
    num_instances: int


EMULATED = Engine(MODEL, GPU, NUM_INSTANCES)


@dataclass(frozen=True, slots=True)
class Scale:
    """time_scale: modelled seconds per real one. policies: the monolith first, it has no use for an SLO. torch_parts: on a
    real engine, instead of parts."""

    parts: Mapping[str, Part]
    time_scale: float
    seeds: tuple[int, ...]
    policies: tuple[str, ...]
    torch_parts: Mapping[str, Part] = field(default_factory=dict)
    engine: Engine = EMULATED

    def on(self, checkpoint: Path | None) -> Scale:
        """With a checkpoint a smaller run of the same sets on a real engine: few instances, which share this machine's cores,
        one seed. None: as it is, emulated."""
        if checkpoint is None:
            return self
        engine = Engine(str(checkpoint), None, NUM_TORCH_INSTANCES)
        return replace(self, parts=self.torch_parts, time_scale=1.0, seeds=self.seeds[:1], engine=engine)


@dataclass(slots=True)
class Found:
    """Of one set under one workload, all seeds together. burst_text_s: TTFT of its text requests that came in a burst of
    pictures; modelled seconds, as goodput is per modelled second. own_scaled_met: shares in time. num_images_left_out: by
    MAX_IMAGES. efforts: one of each replay.
    """

    burst_text_s: list[float] = field(default_factory=list)
    own_scaled_per_s: list[float] = field(default_factory=list)
    class_wide_per_s: list[float] = field(default_factory=list)
    own_scaled_met: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_images_left_out: int = 0
    efforts: list[Effort] = field(default_factory=list)

    def figures(self) -> Iterator[tuple[str, float]]:
        if self.burst_text_s:
            yield "text_p99_ttft_in_bursts_s", percentile(self.burst_text_s, 0.99)
        yield "goodput_own_scaled_per_s", statistics.fmean(self.own_scaled_per_s)
        yield "goodput_class_wide_per_s", statistics.fmean(self.class_wide_per_s)
        yield "attainment_own_scaled", statistics.fmean(self.own_scaled_met)
        yield "num_failed", self.num_failed
        yield "num_images_left_out", self.num_images_left_out
        yield from keeping_up.figures(self.efforts)


Figures = Iterable[tuple[str, float]]
Measure = Callable[["PolicyBench", str], Awaitable[Figures]]


async def side_by_side(scale: Scale, measure: Measure, isolated: Mapping[str, Isolated] | None = None) -> dict[str, float]:
    """What `measure` finds of each set, named FIGURE.SET. isolated: see PolicyBench."""
    with tempfile.TemporaryDirectory() as folder:
        bench = PolicyBench(scale, Path(folder), isolated)
        return {f"{figure}.{name}": value for name in scale.policies for figure, value in await measure(bench, name)}


def by_workload(found: Mapping[str, Found]) -> Figures:
    """Figures named WORKLOAD_FIGURE."""
    return ((f"{workload}_{figure}", value) for workload, one in found.items() for figure, value in one.figures())


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def conditions_of(scale: Scale, plan: Plan) -> dict[str, object]:
    """What a reader should know of the figures."""
    return machine() | {
        "model": Path(scale.engine.model).name,
        "emulated": scale.engine.gpu or "",
        "instances": scale.engine.num_instances,
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

    def cluster(self, policy: str, **more: object) -> AbstractAsyncContextManager[tuple[dict[str, Any], aiohttp.ClientSession]]:
        """measured_cluster's, of that set. more: options of `triptych up` besides, or instead."""
        given = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
        options = self.options(policy) | given
        return measured_cluster(self._scale.engine.model, [str(part) for option in options.items() for part in option])

    async def replay_all(self, policy: str, info: Mapping[str, Any], http: aiohttp.ClientSession) -> dict[str, Found]:
        """By workload, against a cluster of that set (`cluster`)."""
        meter = Effortmeter(info, http)
        found = {workload: Found() for workload in self._scale.parts}
        for workload, into in found.items():
            for seed in self._scale.seeds:
                tell(f"{policy}: {workload}, seed {seed} ...")
                before = await meter.read()
                conditions = await self._replay(str(info["url"]), workload, seed, into)
                into.efforts.append(Effort.between(before, await meter.read()))
                tell(f"  {into.efforts[-1]}{_failures(conditions)}")
        return found

    async def _replay(self, url: str, workload: str, seed: int, into: Found) -> Conditions:
        out = self._folder / f"{workload}-{seed}"
        out.mkdir(exist_ok=True)
        trace = self._trace(workload, seed)
        conditions = await replay(trace, self._replay_options(url, out, seed), Console(quiet=True))
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
        into.num_images_left_out += trace.shaping.num_images_left_out
        if workload == BURSTS:
            into.burst_text_s += self._text_in_bursts(OutcomesReader(out / OUTCOMES_FILE))
        return conditions

    def _text_in_bursts(self, outcomes: Iterable[RequestOutcome]) -> Iterator[float]:
        """Who was not answered has waited as long as anybody would."""
        scale, abridged = self._scale.time_scale, self._scale.parts[BURSTS].abridged
        for outcome in outcomes:
            at_s = outcome.scheduled_s * scale * abridged
            if outcome.request_class == "text" and any(begin_s <= at_s < end_s for begin_s, end_s in IMAGE_BURSTS_S):
                is_answered = outcome.error is None and outcome.ttft_s is not None
                yield scale * (outcome.ttft_s or 0.0) if is_answered else scale * REQUEST_TIMEOUT_S

    def options(self, policy: str) -> dict[str, object]:
        """Of `triptych up`."""
        engine = self._scale.engine
        given: dict[str, object] = {"--policy": policy, "--instances": engine.num_instances, "--preprocess": 2}
        given |= {"--max-prefill-tokens": MAX_PREFILL_TOKENS, "--stream-interval-s": STREAM_INTERVAL_S}
        if engine.gpu:
            given |= {"--emulate": engine.gpu, "--time-scale": self._scale.time_scale}
        if policy_set(policy).queue_order is not fcfs:
            targets_s = {name: SLO_FACTOR * isolated.ttft_s for name, isolated in self.isolated.items()}
            given |= {"--slo-ttft-text-s": targets_s["text"], "--slo-ttft-picture-s": targets_s["image"]}
        return given

    def _trace(self, workload: str, seed: int) -> Trace:
        part = self._scale.parts[workload]
        options = TraceOptions(
            duration_s=part.duration_s * part.abridged,
            text_rate_scale=part.rate / part.abridged,
            image_rate_scale=part.rate / part.abridged,
            speed_up=self._scale.time_scale * part.abridged,
            max_images=MAX_IMAGES,
            seed=seed,
        )
        return workload_trace(workload, msgspec.structs.replace(load_workload(workload), seed=seed), options)

    def _replay_options(self, url: str, out: Path, seed: int) -> ReplayOptions:
        return ReplayOptions(
            target=url.rstrip("/"),
            out=out,
            send=SendOptions(seed=seed),
            timeout_s=REQUEST_TIMEOUT_S,
            slos=parse_slos([f"ttft={SLO_FACTOR}x,tbt={SLO_FACTOR}x"]),
            isolated=self.isolated,
        )


def _failures(conditions: Conditions) -> str:
    """What was said of the first failure of each kind."""
    return "".join(f"\n  failed, {kind}: {told}" for kind, told in conditions.error_examples.items())
