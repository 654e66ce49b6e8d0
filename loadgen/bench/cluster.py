"""Bench cluster: ours beside `vllm serve` on the same cores, under `workloads/chat-reuse` at rates up to two past vLLM's knee.

Both take turns, at each rate with contents that no cache has seen, and then with the same again, when all are known. SLOs are
five times what requests take alone at vLLM. vLLM takes a minute to start, so it stays, idle, while ours is measured, and costs
us 2 % of a core; ours is not there while vLLM is measured, which its heartbeats would cost 9 % (measured).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console

from triptych.loadgen.bench.chat_reuse import (
    ALL,
    KNOWN,
    MAX_IMAGES,
    PICTURES,
    TEXT,
    WORKLOAD,
    chat_trace,
    figures_by_kind,
    first_shown,
    flat,
    kinds_of,
    kinds_of_repeats,
)
from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S, measured_cluster
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, machine
from triptych.loadgen.bench.service_counters import heartbeats, service_counters
from triptych.loadgen.bench.vllm_server import VllmServerOptions, vllm_server
from triptych.loadgen.replay.conditions import OUTCOMES_FILE, Conditions
from triptych.loadgen.replay.exchange import client_session
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.prepare import prepare
from triptych.loadgen.replay.run import replay
from triptych.loadgen.replay.slo import CLASSES, Isolated, parse_slos
from triptych.loadgen.report.results import OutcomesReader
from triptych.loadgen.report.schema import ClassFigures
from triptych.shared.console import progress_console
from triptych.shared.machine import num_cores

OURS, THEIRS = "triptych", "vllm"
COLD, WARM = "cold", "warm"
SLO_FACTOR = 5
ISOLATED_SPAN_S = 600.0  # of the workload, whose sizes are looked at
ISOLATED_SEED = 1000  # and all above: contents that nothing measured later has
MAX_MODEL_LEN = 8192  # chosen: twice the workload's longest prompt
# Of each server in all; ours divides them among prefill and decode. Chosen, so that neither has to evict: a replay of 180 s at
# 5.5 requests/s has some 166,000 distinct tokens of 10 KiB
KV_CACHE_BYTES = 4 << 30
OUR_OPTIONS = {"--policy": "triptych", "--kv-cache-bytes": KV_CACHE_BYTES // 2, "--max-model-len": MAX_MODEL_LEN}
KNEE_ATTAINMENT = 0.9  # DistServe's (arXiv 2401.09670), of the own-scaled SLO
NUM_PAST_KNEE = 2  # rates above its knee: whoever can do more shows it at these
NUM_AROUND_KNEE = 3  # rates that bars are about: the last ones
SEEDS_APART = 100  # of one rate and the next
MIN_NEW = 6  # chosen: requests with new pictures in a replay, else a percentile of theirs tells nothing
# Of P99 TTFTs, ours to theirs. With cold caches a known picture is encoded, but what the prompt says of it is computed
MAX_RATIO = {(COLD, TEXT): 0.5, (COLD, PICTURES): 1.1, (WARM, TEXT): 0.5, (WARM, KNOWN): 0.5}
MIN_GOODPUT_RATIO = 1.3  # past the knee: before it, both do what is asked of them
LEAST_PER_S = 1e-3  # chosen: nobody divides by a goodput of none


@dataclass(frozen=True, slots=True)
class Scale:
    """duration_s: of a replay, whose first warm_up_s do not count. rates_per_s: measured one after the other, until two are
    too much for vLLM."""

    duration_s: float
    warm_up_s: float
    rates_per_s: tuple[float, ...]


# Chosen: a quarter more each time, so that two past the knee are around it. Of 90 s the same requests had P99s 3 times apart at
# vLLM (measured): a percentile of some 140. A rate takes a quarter of an hour
FULL = Scale(180.0, 15.0, (1.8, 2.25, 2.8, 3.5, 4.4, 5.5))
QUICK = Scale(20.0, 4.0, (1.0,))


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """vllm_python: an interpreter that can import vllm. rates_per_s: to be measured, all; none: up to two past the knee."""

    model: Path
    vllm_python: Path
    rates_per_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Server:
    """urls: of all that counts something, whose names begin with prefix."""

    side: str
    url: str
    urls: Sequence[str]
    prefix: str

    async def counters(self) -> Counter[str]:
        async with aiohttp.ClientSession() as http:
            return await service_counters(http, self.urls, self.prefix)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay came to: of every request, warm-up included."""

    outcomes: Sequence[RequestOutcome]
    conditions: Conditions


async def bench_cluster(options: ClusterOptions, plan: Plan) -> Report:
    """Raises BenchFailed, ClusterFailed: something didn't start, or a replay did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        bench = _ClusterBench(options, QUICK if plan.is_quick else FULL, Path(folder))
        await bench.run()
    conditions = machine() | {
        "model": options.model.name,
        "workload": WORKLOAD,
        "slo": f"{SLO_FACTOR}x isolated at vLLM",
        "isolated_ttft_s": {name: isolated.ttft_s for name, isolated in bench.isolated.items()},
        "isolated_tbt_s": {name: isolated.tbt_s for name, isolated in bench.isolated.items()},
        "knee_per_s": knee_of(bench.found),
        "kv_cache_bytes": KV_CACHE_BYTES,
        "ours": " ".join(_words(our_options(bench.isolated))),
        "versions": bench.versions,
        "counters": bench.counters,
        "quick": plan.is_quick,
    }
    return Report("cluster", conditions, bench.figures(), {} if plan.is_quick else _bars(bench.found))


Found = dict[tuple[str, float, str], Mapping[str, ClassFigures]]  # by pass, rate and side


@dataclass(slots=True)
class _ClusterBench:
    """folder: for the results of the replays."""

    options: ClusterOptions
    scale: Scale
    folder: Path
    console: Console = field(default_factory=progress_console)
    isolated: Mapping[str, Isolated] = field(default_factory=dict)
    found: Found = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    counters: dict[str, Mapping[str, int]] = field(default_factory=dict)

    async def run(self) -> None:
        self._tell(f"{THEIRS}: starting ...")
        async with self._vllm() as theirs:
            await self._measure_isolated(theirs)
            for number, rate in enumerate(self.options.rates_per_s or self.scale.rates_per_s):
                seed = telling_seed(rate, self.scale, first=1 + number * SEEDS_APART)
                replays: dict[tuple[str, str], Replayed] = {}
                for side in (THEIRS, OURS) if number % 2 else (OURS, THEIRS):
                    async with self._ours() if side == OURS else contextlib.nullcontext(theirs) as server:
                        for name in (COLD, WARM):
                            replays[name, side] = await self._replay(server, name, rate, seed)
                self._take_in(replays, rate, seed)
                if not self.options.rates_per_s and num_past_knee(self.found) == NUM_PAST_KNEE:
                    break

    def figures(self) -> dict[str, float]:
        """As ROW.SIDE; a side has a column for each rate."""
        return {
            f"{name}_{row}.{side} {rate:.2f}/s": value
            for (name, rate, side), figures in self.found.items()
            for row, value in flat(figures)
        }

    async def _measure_isolated(self, theirs: _Server) -> None:
        """Of requests of all sizes, by class."""
        options = self._replay_options(theirs, SendOptions(seed=ISOLATED_SEED))
        trace = chat_trace(1.0, ISOLATED_SPAN_S, ISOLATED_SEED)
        async with client_session({}, REQUEST_TIMEOUT_S) as http:
            self.isolated = (await prepare(http, trace, options, self._tell)).isolated
        if len(self.isolated) < len(CLASSES) or any(alone.tbt_s is None for alone in self.isolated.values()):
            raise BenchFailed("what requests take alone could not be measured")

    async def _replay(self, server: _Server, name: str, rate: float, seed: int) -> Replayed:
        self._tell(f"{server.side}: {rate:.2f} requests/s, {name} cache ...")
        before = await server.counters()
        options = self._replay_options(server, SendOptions(seed=seed, warm_up_s=self.scale.warm_up_s))
        conditions = await replay(chat_trace(rate, self.scale.duration_s, seed), options, self.console)
        if conditions.ended != "complete":
            raise BenchFailed(f"a replay did not come to its end: {conditions.message}")
        self.counters[f"{server.side} {rate:.2f}/s {name}"] = await server.counters() - before
        self.versions[server.side] = conditions.versions["server"]
        return Replayed(list(OutcomesReader(self.folder / OUTCOMES_FILE)), conditions)

    def _take_in(self, replays: Mapping[tuple[str, str], Replayed], rate: float, seed: int) -> None:
        """replays: all of a rate, by pass and side."""
        rows = list(chat_trace(rate, self.scale.duration_s, seed))
        cold = kinds_of(rows, [replayed.outcomes for (name, _), replayed in replays.items() if name == COLD])
        kinds = {COLD: cold, WARM: kinds_of_repeats(cold)}
        for (name, side), replayed in replays.items():
            self.found[name, rate, side] = figures_by_kind(replayed.outcomes, kinds[name], replayed.conditions)

    def _replay_options(self, server: _Server, send: SendOptions) -> ReplayOptions:
        return ReplayOptions(
            target=server.url,
            out=self.folder,
            send=send,
            timeout_s=REQUEST_TIMEOUT_S,
            slos=parse_slos([f"ttft={SLO_FACTOR}x,tbt={SLO_FACTOR}x"]),
            isolated=self.isolated,
        )

    @contextlib.asynccontextmanager
    async def _ours(self) -> AsyncIterator[_Server]:
        async with measured_cluster(self.options.model, _words(our_options(self.isolated))) as (info, _):
            urls = [beat.http_url for beat in await heartbeats(str(info["nats_url"])) if beat.http_url]
            yield _Server(OURS, str(info["url"]).rstrip("/"), urls, "triptych_")

    @contextlib.asynccontextmanager
    async def _vllm(self) -> AsyncIterator[_Server]:
        options = VllmServerOptions(
            self.options.vllm_python, self.options.model.absolute(), KV_CACHE_BYTES, MAX_MODEL_LEN, MAX_IMAGES, num_cores()
        )
        async with vllm_server(options, self.console) as url:
            yield _Server(THEIRS, url, [url], "vllm:")

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def telling_seed(rate: float, scale: Scale, first: int) -> int:
    """The first one with which there are enough requests with new pictures, whatever the servers do; the first of all, in a
    replay too short for any."""

    def num_new(seed: int) -> int:
        rows = first_shown(chat_trace(rate, scale.duration_s, seed))
        return sum(row.arrival_s >= scale.warm_up_s for row in rows)

    return next((seed for seed in range(first, first + SEEDS_APART) if num_new(seed) >= MIN_NEW), first)


def our_options(isolated: Mapping[str, Isolated]) -> dict[str, object]:
    """Of `triptych up`. The limit between tokens, as an operator would tell it (vLLM has no such option), is that of a class's
    median request, the smallest one: a server is told one for all. None of first tokens: it would refuse late requests.
    """
    tbts_s = [alone.tbt_s for alone in isolated.values() if alone.tbt_s is not None]
    return OUR_OPTIONS | {"--slo-tbt-s": round(SLO_FACTOR * min(tbts_s), 4)}


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(part) for option in options.items() for part in option]


def knee_of(found: Found) -> float | None:
    """The highest of the rates that vLLM keeps up with, with cold caches."""
    slos = {rate: found[COLD, rate, THEIRS][ALL].slo_own_scaled for rate in _rates(found)}
    return max((rate for rate, slo in slos.items() if slo is not None and slo.met >= KNEE_ATTAINMENT), default=None)


def num_past_knee(found: Found) -> int:
    """How many of the rates are above that."""
    knee_per_s = knee_of(found) or 0.0
    return sum(rate > knee_per_s for rate in _rates(found))


def _rates(found: Found) -> list[float]:
    return sorted({rate for _, rate, _ in found})


def _bars(found: Found) -> dict[str, Bar]:
    """TTFT at each rate, cold and warm apart. Goodput at the highest one with cold caches, when that is past the knee: where
    all is in time for both sides, the ratio is 1."""
    bars: dict[str, Bar] = {}
    around_knee = _rates(found)[-NUM_AROUND_KNEE:]
    for (name, rate, side), figures in found.items():
        if rate not in around_knee:
            continue
        for row, ours in figures.items() if side == OURS else ():
            theirs, most = found[name, rate, THEIRS].get(row), MAX_RATIO.get((name, row))
            if most and theirs and ours.ttft_s and theirs.ttft_s:
                ratio = ours.ttft_s.p99 / theirs.ttft_s.p99
                bars[f"{name}_{row}_ttft_p99_ratio_{rate:.2f}/s"] = Bar(ratio, most, is_most=True)
    if not num_past_knee(found):
        return bars
    highest = around_knee[-1]
    goodput_ratio = _goodput_per_s(found, highest, OURS) / max(_goodput_per_s(found, highest, THEIRS), LEAST_PER_S)
    return bars | {f"cold_goodput_own_scaled_ratio_{highest:.2f}/s": Bar(goodput_ratio, MIN_GOODPUT_RATIO)}


def _goodput_per_s(found: Found, rate: float, side: str) -> float:
    """With cold caches."""
    slo = found[COLD, rate, side][ALL].slo_own_scaled
    return 0.0 if slo is None else slo.goodput_per_s
