"""Whether the machine keeps up with the instances that it emulates, and which processes take its time. Used by the benches of
policies: where it does not keep up, what they find is about the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]

from triptych.loadgen.bench.report import Bar
from triptych.loadgen.bench.service_counters import gauge, heartbeats
from triptych.shared.messages import InstanceId

LOST = "triptych_emulation_lost_seconds"
MEASURED = ("emulated", "router")
# Chosen: policies are told apart by 2 to 3 per cent. What is lost makes one instance slower, and the worst one counts here
MAX_LOST_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class Reading:
    """At a moment, sums since the start: lost_s by instance, cpu_s by process."""

    at_s: float
    lost_s: Mapping[InstanceId, float]
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Effort:
    """From one moment to another. lost_share: the share of the time that steps ended late by, at the instance that is worst
    off; None where nothing is emulated. busy_cores: by process."""

    lost_share: float | None
    busy_cores: Mapping[str, float]

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Effort:
        passed_s = after.at_s - before.at_s
        lost_s = [value - before.lost_s.get(id_, 0.0) for id_, value in after.lost_s.items()]
        busy = {name: (value - before.cpu_s.get(name, 0.0)) / passed_s for name, value in after.cpu_s.items()}
        return cls(max(lost_s) / passed_s if lost_s else None, busy)


def figures(efforts: Sequence[Effort]) -> Iterator[tuple[str, float]]:
    """Of several replays: the worst of each."""
    if lost_shares := [effort.lost_share for effort in efforts if effort.lost_share is not None]:
        yield "emulation_lost_share", max(lost_shares)
    for name in efforts[0].busy_cores:
        yield f"busy_cores_{name}", max(effort.busy_cores.get(name, 0.0) for effort in efforts)


def bar(figures: Mapping[str, float]) -> dict[str, Bar]:
    """Where it does not hold, the others mean nothing: take a lower time scale, or leave the machine alone."""
    name = "emulation_lost_share"
    worst = max(value for figure, value in figures.items() if name in figure)
    return {name: Bar(worst, MAX_LOST_SHARE, is_most=True)}


class Effortmeter:
    """info: of measured_cluster, as http."""

    def __init__(self, info: Mapping[str, Any], http: aiohttp.ClientSession) -> None:
        self._info = info
        self._http = http

    async def read(self) -> Reading:
        beats = await heartbeats(self._info["nats_url"])
        pids = {name: pid for name in MEASURED if (pid := self._info["pids"].get(f"{name}-0"))} | {"loadgen": os.getpid()}
        emulated = [beat for beat in beats if beat.service == "instance" and "emulated" in pids]
        lost_s = {beat.instance_id: await gauge(self._http, beat.http_url, LOST) for beat in emulated}
        return Reading(time.monotonic(), lost_s, {name: _cpu_s(pid) for name, pid in pids.items()})


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
