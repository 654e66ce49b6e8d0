"""Bench cache: TTFT of a request with four pictures when all of it is known, its beginning, or its pictures only, beside the
first time; and what the cache costs that first time.

Two clusters that differ only in whether they keep anything take turns with the same requests. What is known is not told by the
clock alone: the services count what they encoded, decoded and transferred.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from triptych.loadgen.bench.measured_cluster import measured_cluster
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, machine, tell
from triptych.loadgen.bench.service_counters import heartbeats, service_counters
from triptych.loadgen.client import AnswerFailed, chat_body, read_events, text_of
from triptych.loadgen.world.picture import render
from triptych.loadgen.world.scene import make_scene
from triptych.loadgen.world.seeds import generator
from triptych.shared.settings import load_settings

POLICIES = {"cached": "triptych", "uncached": "triptych_uncached"}
NUM_PICTURES = 4
PICTURE_SIZE = (448, 448)  # pixels
MAX_TOKENS = 16  # chosen: an answer of one KV block
MIN_PAIRS = 30
NUM_WARMUPS = 2  # chosen: connections, transfer pairs, page faults
KV_CACHE_BYTES = 16 << 20  # chosen: holds the conversation of one round, and is soon filled by another prompt
PAUSE_S = 0.2  # chosen: a reader's; what was computed is told to the index meanwhile
FILLER_TOKEN_IDS = 256  # the single bytes of our vocabularies
FILLER_OUTPUT_TOKENS = 2  # so that decode has the KV, too
# The promises, as ratios to the first time's TTFT
LIMITS = {"second": 0.2, "follow_up": 0.35, "kv_evicted": 0.6}
MAX_COLD_RATIO = 1.03  # with the cache, over without
COUNTERS = {"encoded": "images_encoded", "decoded": "pictures_decoded", "transferred": "pixel_transfers"}
NUM_RESAMPLES = 2000  # chosen: of the bootstrap


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_ms: float
    text: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A running cluster. urls: of all its services. num_pool_tokens: of a prompt that fills its largest KV pool."""

    http: aiohttp.ClientSession
    url: str
    urls: Sequence[str]
    num_pool_tokens: int
    max_prompt_tokens: int

    async def ask(self, body: dict[str, Any]) -> Answer:
        began_s, first_s = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        pieces = []
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            async for chunk in read_events(response):
                pieces.append(text_of(chunk))
                if not first_s and pieces[-1]:
                    first_s = time.perf_counter() - began_s
                usage = chunk.get("usage") or usage
        if not first_s:
            raise AnswerFailed("an answer without text")
        return Answer(1000 * first_s, "".join(pieces), usage["prompt_tokens_details"]["cached_tokens"])

    async def evict_kv(self, rng: random.Random) -> None:
        """Prompts that need all blocks of prefill's pool, and of decode's."""
        num_tokens = min(self.num_pool_tokens, self.max_prompt_tokens)
        for _ in range(math.ceil(self.num_pool_tokens / num_tokens)):
            prompt = rng.choices(range(FILLER_TOKEN_IDS), k=num_tokens)
            body = {"prompt": prompt, "max_tokens": FILLER_OUTPUT_TOKENS, "ignore_eos": True}
            async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise AnswerFailed(f"status {response.status}: {(await response.text())[:500]}")

    async def counters(self) -> Counter[str]:
        return await service_counters(self.http, self.urls)


class _Rounds:
    """TTFTs by kind of request, and what the services did for the second of them and for later ones, over all rounds."""

    def __init__(self, cached: _Cluster, uncached: _Cluster) -> None:
        self._clusters = {"cached": cached, "uncached": uncached}
        self._cached = cached
        self.ttft_ms: dict[str, list[float]] = {kind: [] for kind in ("first", "uncached_first", *LIMITS)}
        self.work: dict[str, Counter[str]] = {kind: Counter() for kind in LIMITS}

    async def run(self, number: int, counts: bool) -> None:
        """One round with pictures and texts of its own."""
        rng = random.Random(number)
        body = _request(number)
        order = list(self._clusters) if number % 2 == 0 else list(self._clusters)[::-1]
        first = {name: await self._clusters[name].ask(body) for name in order}
        measured = {"first": first["cached"], "uncached_first": first["uncached"]}
        measured["second"] = await self._counted("second", body, counts)
        measured["follow_up"] = await self._counted("follow_up", _follow_up(body, first["cached"].text), counts)
        await self._cached.evict_kv(rng)
        measured["kv_evicted"] = await self._counted("kv_evicted", body, counts)
        _check(measured)
        if counts:
            for kind, answer in measured.items():
                self.ttft_ms[kind].append(answer.ttft_ms)

    async def _counted(self, kind: str, body: dict[str, Any], counts: bool) -> Answer:
        await asyncio.sleep(PAUSE_S)
        before = await self._cached.counters()
        answer = await self._cached.ask(body)
        if counts:
            self.work[kind] += await self._cached.counters() - before
        return answer


async def bench_cache(models: Sequence[Path], plan: Plan) -> Report:
    """Measure the checkpoints in these folders; the bars are of the first.

    Raises:
        BenchFailed, ClusterFailed, AnswerFailed: something didn't start, didn't answer, or was not cached at all.
    """
    num_pairs = 1 if plan.is_quick else max(MIN_PAIRS, plan.num_runs)
    conditions = machine() | {"pairs": num_pairs, "pictures": NUM_PICTURES, "size": PICTURE_SIZE, "quick": plan.is_quick}
    found = {folder.name: _figures(await _measure(folder, num_pairs)) for folder in models}
    figures = {f"{row}.{name}": value for name, rows in found.items() for row, value in rows.items()}
    return Report("cache", conditions, figures, {} if plan.is_quick else _bars(next(iter(found.values()))))


async def _measure(folder: Path, num_pairs: int) -> _Rounds:
    async with AsyncExitStack() as stack:
        sides = [await _start(stack, folder, policy) for policy in POLICIES.values()]
        rounds = _Rounds(*sides)
        tell(f"{folder.name}: {num_pairs} rounds ...")
        for number in range(NUM_WARMUPS + num_pairs):
            await rounds.run(number, counts=number >= NUM_WARMUPS)
    return rounds


async def _start(stack: AsyncExitStack, folder: Path, policy: str) -> _Cluster:
    options = ("--policy", policy, "--kv-cache-bytes", str(KV_CACHE_BYTES))
    info, http = await stack.enter_async_context(measured_cluster(folder, options))
    beats = await heartbeats(str(info["nats_url"]))
    num_blocks = max(beat.resources.num_blocks for beat in beats)
    return _Cluster(
        http,
        str(info["url"]).rstrip("/"),
        [beat.http_url for beat in beats if beat.http_url],
        num_pool_tokens=num_blocks * load_settings().block_size - FILLER_OUTPUT_TOKENS,
        max_prompt_tokens=min(beat.model.max_model_len for beat in beats if beat.model) - FILLER_OUTPUT_TOKENS,
    )


def _request(number: int) -> dict[str, Any]:
    """It differs from all others from its first words on."""
    rng = generator(number, held_out=True)
    pictures = []
    for _ in range(NUM_PICTURES):
        file = io.BytesIO()
        render(make_scene(rng), *PICTURE_SIZE, rng)[0].save(file, "PNG")
        pictures.append(file.getvalue())
    body = chat_body("What do these pictures have in common?", pictures, MAX_TOKENS, ignore_eos=True)
    body["messages"].insert(0, {"role": "system", "content": f"{number} is the number of this conversation."})
    return body


def _follow_up(body: dict[str, Any], answer: str) -> dict[str, Any]:
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And in what do they differ?"}]
    return {**body, "messages": [*body["messages"], *turns]}


def _check(measured: dict[str, Answer]) -> None:
    """That each kind of request is what its name says, or its figures would be lies."""
    for kind, answer in measured.items():
        if (answer.num_cached_tokens > 0) != (kind in {"second", "follow_up"}):
            raise BenchFailed(f"{answer.num_cached_tokens} tokens of a prompt were cached: {kind}")


def _figures(rounds: _Rounds) -> dict[str, float]:
    medians = {kind: statistics.median(values) for kind, values in rounds.ttft_ms.items()}
    pairs = zip(rounds.ttft_ms["first"], rounds.ttft_ms["uncached_first"], strict=True)
    cold_ratios = [cached / uncached for cached, uncached in pairs]
    low, high = _interval(cold_ratios)
    return {
        **{f"{kind}_ttft_ms": value for kind, value in medians.items()},
        **{f"{kind}_ratio": medians[kind] / medians["first"] for kind in LIMITS},
        "cold_ratio": statistics.median(cold_ratios),
        "cold_ratio_low": low,
        "cold_ratio_high": high,
        **{f"{kind}_{what}": work[name] for kind, work in rounds.work.items() for what, name in COUNTERS.items()},
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with a probability of 95 %, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


def _bars(figures: dict[str, float]) -> dict[str, Bar]:
    ratios = {f"{kind}_ratio": Bar(figures[f"{kind}_ratio"], limit, is_most=True) for kind, limit in LIMITS.items()}
    nothing = [f"second_{what}" for what in COUNTERS] + [f"{kind}_encoded" for kind in LIMITS if kind != "second"]
    zeros = {name: Bar(figures[name], 0, is_most=True) for name in nothing}
    return ratios | zeros | {"cold_ratio": Bar(figures["cold_ratio"], MAX_COLD_RATIO, is_most=True)}
