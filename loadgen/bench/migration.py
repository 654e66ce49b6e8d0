"""Bench migration: what it costs a running request to go on at another decode instance, beside computing its prompt again; and
how soon an instance serves with other roles.

A stream of a new prompt is handed over in its middle. The pause in it is the cost, all messages included; what prefill took
for the same prompt, which nobody had cached, is what recomputing would cost, without any message.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from triptych.loadgen.bench.measured_cluster import measured_cluster
from triptych.loadgen.bench.models import DEMO_CHECKPOINT
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, machine, tell
from triptych.loadgen.client import TRACE_HEADERS, AnswerFailed, read_events
from triptych.shared.bus import Bus
from triptych.shared.messages import (
    HEARTBEAT_SUBJECT,
    Event,
    HandOverRequest,
    Heartbeat,
    InstanceId,
    Role,
    SwitchRequest,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 2000, 96
QUICK_PROMPT_TOKENS = 100
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 200  # ordinary tokens of every checkpoint that we make
BEFORE = 32  # tokens until it is handed over: heartbeats tell where it runs
MAX_RATIO = 0.25
MAX_SWITCH_MS = 200.0
WAIT_S = 20.0  # chosen
OPTIONS = ("--prefill", "1", "--decode", "2", "--stream-interval-s", "0", "--heartbeat-interval-s", "0.1")


@dataclass(slots=True)
class _Cluster:
    """A running one, and who is in it."""

    http: aiohttp.ClientSession
    url: str
    bus: Bus
    beats: dict[InstanceId, Heartbeat] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        await self.bus.listen(HEARTBEAT_SUBJECT, self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Heartbeat):
            self.beats[event.instance_id] = event
            self.news.set()

    async def find(self, holds: Callable[[Heartbeat], bool]) -> InstanceId:
        """The first instance whose heartbeat is so."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for instance_id, beat in self.beats.items():
                    if holds(beat):
                        return instance_id
                self.news.clear()
                await self.news.wait()


async def bench_migration(folder: Path, plan: Plan) -> Report:
    """Measure moves with the checkpoint in `folder`, and switches of roles with the demo's.

    Raises:
        ClusterFailed, AnswerFailed, BenchFailed: something didn't start, answer, or move.
    """
    num_tokens = QUICK_PROMPT_TOKENS if plan.is_quick else PROMPT_TOKENS
    tell(f"{plan.runs} requests of {num_tokens} tokens ...")
    figures = await _with_cluster(folder, lambda cluster: _moves(cluster, num_tokens, plan.runs))
    tell(f"{plan.runs} switches there and back ...")
    figures |= await _with_cluster(DEMO_CHECKPOINT, lambda cluster: _switches(cluster, plan.runs))
    bars = {
        "pause_to_prefill": Bar(figures["pause_to_prefill"], MAX_RATIO, is_most=True),
        "switch_ms": Bar(figures["switch_ms"], MAX_SWITCH_MS, is_most=True),
    }
    conditions = machine() | {"model": str(folder), "prompt_tokens": num_tokens, "runs": plan.runs, "quick": plan.is_quick}
    return Report("migration", conditions, figures, {} if plan.is_quick else bars)


async def _with_cluster(folder: Path, measure: Callable[[_Cluster], Any]) -> dict[str, float]:
    async with measured_cluster(folder, OPTIONS) as (info, http):
        bus = await Bus.connect(info["nats_url"], "bench")
        try:
            cluster = _Cluster(http, str(info["url"]).rstrip("/"), bus)
            await cluster.listen()
            figures: dict[str, float] = await measure(cluster)
            return figures
        finally:
            await bus.close()


async def _moves(cluster: _Cluster, num_tokens: int, num_runs: int) -> dict[str, float]:
    rng = random.Random(0)
    await _moved(cluster, rng, num_tokens)  # connections, shared memory that is mapped for the first time
    measured = [await _moved(cluster, rng, num_tokens) for _ in range(num_runs)]
    figures = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return figures | {"pause_to_prefill": figures["pause_ms"] / figures["prefill_ms"]}


async def _moved(cluster: _Cluster, rng: random.Random, num_tokens: int) -> Mapping[str, float]:
    """One request with a prompt of its own, handed over once."""
    prompt = [rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    at_s: list[float] = []
    trace: dict[str, Any] = {}
    handing_over: asyncio.Task[None] | None = None
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=TRACE_HEADERS) as response:
        async for chunk in read_events(response):
            at_s.append(time.perf_counter())
            trace = chunk.get("triptych", trace)
            if len(at_s) == BEFORE:
                handing_over = asyncio.create_task(_hand_over(cluster))
    if handing_over is None:
        raise AnswerFailed("an answer of a few tokens only")
    await handing_over
    stages = {name: [one for one in trace["stages"] if one["stage"] == name] for name in ("prefill", "decode")}
    if len(stages["decode"]) != 2:
        raise BenchFailed("a request was not handed over once: the machine is too slow, or too fast, for this benchmark")
    gaps_ms = [1000 * (after - before) for before, after in itertools.pairwise(at_s)]
    usual_ms = statistics.median(gaps_ms)
    return {
        "pause_ms": max(gaps_ms[BEFORE - 1 :]) - usual_ms,
        "transfer_ms": float(stages["decode"][1]["transfer_ms"]),
        "prefill_ms": float(stages["prefill"][0]["compute_ms"]),
        "tbt_ms": usual_ms,
    }


async def _hand_over(cluster: _Cluster) -> None:
    instance_id = await cluster.find(lambda beat: any(one.stage == "decode" and one.num_running for one in beat.loads))
    await cluster.bus.request(instance_id, HandOverRequest(), WAIT_S)


async def _switches(cluster: _Cluster, num_runs: int) -> dict[str, float]:
    """Of a decode instance that becomes one for prompts, and back. Until its heartbeat is heard: routers choose by that."""
    instance_id = await cluster.find(lambda beat: beat.roles == ("decode",))
    took_ms: list[float] = []
    ways: tuple[tuple[Role, ...], ...] = (("encoder", "prefill"), ("decode",))
    for roles in ways * max(1, num_runs):
        began_s = time.perf_counter()
        asking = asyncio.create_task(cluster.bus.request(instance_id, SwitchRequest(roles), WAIT_S))
        await cluster.find(lambda beat, roles=roles: beat.instance_id == instance_id and beat.roles == roles)  # type: ignore[misc]
        took_ms.append(1000 * (time.perf_counter() - began_s))
        await asking
    return {"switch_ms": statistics.median(took_ms), "slowest_switch_ms": max(took_ms)}
