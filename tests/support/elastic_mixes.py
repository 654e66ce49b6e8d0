"""Requests for elastic_world.py: a mix that drifts, and one that does not. Seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from support.elastic_world import Arrival

COUNTS = ((1, 66), (2, 5), (3, 16), (5, 8), (8, 5))  # pictures of a request, in percent: loadgen/workloads/day.toml


@dataclass(frozen=True)
class Phase:
    """Rates are requests per second; output: mean tokens."""

    seconds: float
    text_per_s: float
    image_per_s: float
    output: float = 80.0


def arrivals(phases: Sequence[Phase], seed: int, scale: float = 1.0) -> list[Arrival]:
    """scale: of all rates."""
    draw, at_s, found = random.Random(seed), 0.0, []
    for phase in phases:
        found += [
            Arrival(at, _size(draw, 1000, 4000), _size(draw, phase.output, 600))
            for at in _times(draw, at_s, phase.seconds, scale * phase.text_per_s)
        ]
        found += [
            Arrival(at, _size(draw, 60, 400), _size(draw, phase.output, 600), _count(draw))
            for at in _times(draw, at_s, phase.seconds, scale * phase.image_per_s)
        ]
        at_s += phase.seconds
    return sorted(found, key=lambda arrival: arrival.at_s)


def _times(draw: random.Random, begin_s: float, seconds: float, per_s: float) -> list[float]:
    times, at_s = [], begin_s
    while per_s > 0 and (at_s := at_s + draw.expovariate(per_s)) < begin_s + seconds:
        times.append(at_s)
    return times


def _size(draw: random.Random, mean: float, most: int) -> int:
    return max(2, min(most, round(draw.expovariate(1 / mean))))


def _count(draw: random.Random) -> int:
    return draw.choices([count for count, _ in COUNTS], [weight for _, weight in COUNTS])[0]
