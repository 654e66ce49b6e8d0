"""Distributions as tables: sizes by percentiles, counts by weights. Both turn u, uniform over 0 to 1, into a value."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

MAX_SIZE = 10_000_000  # tokens, pictures, turns; chosen: beyond every model's context
MEAN_STEPS = 1000  # chosen: the mean is read at so many points


class Sizes:
    """Percent -> size, at least 1; between two entries log(size) grows evenly, beyond the first and the last one size stays."""

    def __init__(self, percentiles: Mapping[float, float]) -> None:
        knots = sorted(percentiles.items())
        sizes = [size for _, size in knots]
        are_sizes = bool(sizes) and all(a <= b for a, b in pairwise((1, *sizes, MAX_SIZE)))
        if not are_sizes or not all(0 <= percent <= 100 for percent, _ in knots):
            raise ValueError(f"percentiles are of 0 to 100, and their sizes, of 1 to {MAX_SIZE}, do not fall")
        self._shares = [percent / 100 for percent, _ in knots]
        self._logs = [math.log(size) for size in sizes]

    def at(self, u: float) -> int:
        after = bisect_right(self._shares, u)
        if after in (0, len(self._shares)):
            return round(math.exp(self._logs[0 if after == 0 else -1]))
        part = (u - self._shares[after - 1]) / (self._shares[after] - self._shares[after - 1])
        return round(math.exp(self._logs[after - 1] + part * (self._logs[after] - self._logs[after - 1])))

    @property
    def mean(self) -> float:
        return sum(self.at((step + 0.5) / MEAN_STEPS) for step in range(MEAN_STEPS)) / MEAN_STEPS


class Counts:
    """Count -> weight; any positive weights."""

    def __init__(self, weights: Mapping[int, float]) -> None:
        if not weights or not all(1 <= count <= MAX_SIZE and 0 < weight < math.inf for count, weight in weights.items()):
            raise ValueError(f"counts are 1 to {MAX_SIZE}, each with a weight above 0")
        self._counts = sorted(weights)
        total = sum(weights.values())
        self._ends = list(accumulate(weights[count] / total for count in self._counts))

    def at(self, u: float) -> int:
        return self._counts[min(bisect_right(self._ends, u), len(self._counts) - 1)]
