"""When requests come: a renewal process whose rate changes over time. Its parts are piecewise constant functions of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from statistics import NormalDist

from triptych.loadgen.synth.published import RATES
from triptych.loadgen.synth.workload import Burst, Client, Workload

STRATA = 8  # chosen: as many levels of three hours as a day has

Pieces = Iterator[tuple[float, float]]  # (end_s, value), from 0 on, without end


def constant(value: float) -> Pieces:
    yield math.inf, value


def held(levels: Iterator[float], mean_s: float, rng: Random) -> Pieces:
    """Each level lasts for half of the mean time to one and a half of it; chosen."""
    end_s = 0.0
    for level in levels:
        end_s += mean_s * rng.uniform(0.5, 1.5)
        yield end_s, level


def gamma_levels(variance: float, rng: Random) -> Iterator[float]:
    """Of mean 1."""
    while True:
        yield rng.gammavariate(1 / variance, variance)


def normal_levels(rng: Random) -> Iterator[float]:
    """Every STRATA of them hold one of each part of the distribution, so that a day of a few levels has the published mix."""
    while True:
        for stratum in rng.sample(range(STRATA), STRATA):
            yield NormalDist().inv_cdf((stratum + rng.uniform(0.001, 0.999)) / STRATA)


def of_hours(client: Client, workload: Workload) -> Pieces:
    if client.hours is None:
        yield from constant(1.0)
        return
    for passed in count():
        yield (passed + 1) * workload.day_s / 24, RATES[client.hours].at(workload.start_hour + passed)


def of_bursts(bursts: Sequence[Burst], factor: Callable[[Burst], float]) -> Pieces:
    """The product of the bursts that go on."""
    edges = sorted({edge for burst in bursts for edge in (burst.start_s, burst.start_s + burst.duration_s)} - {0.0})
    for start_s, end_s in zip([0.0, *edges], [*edges, math.inf], strict=True):
        running = [burst for burst in bursts if burst.start_s <= start_s < burst.start_s + burst.duration_s]
        yield end_s, math.prod(factor(burst) for burst in running)


def together(*functions: Pieces) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Several functions as one, with a piece for each change of any of them."""
    current = [next(function) for function in functions]
    while True:
        end_s = min(end for end, _ in current)
        yield end_s, tuple(value for _, value in current)
        if end_s == math.inf:
            return
        current = [piece if piece[0] > end_s else next(function) for piece, function in zip(current, functions, strict=True)]


def mean_rate(client: Client, workload: Workload) -> float:
    """Requests per second that are to be expected over the whole workload."""
    begin_s, total = 0.0, 0.0
    for end_s, (hour, burst) in together(of_hours(client, workload), of_bursts(client.burst, lambda burst: burst.rate)):
        total += (min(end_s, workload.duration_s) - begin_s) * hour * burst
        begin_s = end_s
        if end_s >= workload.duration_s:
            break
    return client.requests_per_s * total / workload.duration_s


def gaps(cv: float, rng: Random) -> Iterator[float]:
    """Gamma distributed with mean 1; the first one as somebody sees it who comes at any time."""
    if cv == 0:
        yield rng.random()
        while True:
            yield 1.0
    shape, scale = 1 / cv**2, cv**2
    yield rng.random() * rng.gammavariate(shape + 1, scale)
    while True:
        yield rng.gammavariate(shape, scale)


class Arrivals:
    """Draws times piece by piece, so that a gap that spans a change of the rate is right."""

    def __init__(self, cv: float, rng: Random) -> None:
        self._gaps = gaps(cv, rng)
        self._left = next(self._gaps)  # until the next request, in mean gaps
        self._now_s = 0.0

    def until(self, end_s: float, rate_per_s: float) -> Iterator[float]:
        """Times from the last call's end to this one, at this rate."""
        while rate_per_s > 0 and (time_s := self._now_s + self._left / rate_per_s) < end_s:
            self._now_s, self._left = time_s, next(self._gaps)
            yield time_s
        self._left -= (end_s - self._now_s) * rate_per_s
        self._now_s = end_s
