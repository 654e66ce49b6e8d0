"""A histogram whose bins grow by a constant factor: percentiles of any number of values, all but exact, in constant memory.

Such histograms add up, so the ones of the smallest classes are kept and those of larger classes are sums. The bins are those
of DDSketch (VLDB 2019, arXiv 1908.10693), without its collapsing: durations span a bounded range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

RELATIVE_ERROR = 0.0025  # of a percentile, at most. Chosen: ratios of two percentiles are shown, and are good to 0.5 %
SMALLEST, LARGEST = 1e-9, 1e9  # what lies beyond is in the outermost bins; with these there are at most 8,290 bins
_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_MIDDLE = 2 / (1 + _GROWTH)  # of a bin over its upper edge: as far from one edge as from the other, relative to them


class Histogram:
    """Counts of values by size; exact count, sum, least, largest. A negative value (a clock's jitter) is in the lowest bin."""

    __slots__ = ("_bins", "count", "largest", "least", "total")

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.add_all((value,))

    def add_all(self, values: Sequence[float]) -> None:
        """Count each of the values."""
        if not values:
            return
        self._bins.update(map(_bin, values))
        self.count += len(values)
        self.total += sum(values)
        self.least = max(0.0, min(self.least, *values))
        self.largest = max(self.largest, *values)

    def percentiles(self, levels: Iterable[float]) -> list[float]:
        """For each level of 0 to 100, ascending, the least value that so many percent of the values do not exceed.

        Raises:
            ValueError: it is empty.
        """
        if not self.count:
            raise ValueError("no values, no percentiles")
        edges = iter(sorted(self._bins.items()))
        at, seen = next(edges)
        found = []
        for level in levels:
            rank = max(1, math.ceil(level / 100 * self.count - 1e-9))  # 1e-9: 99.9 % of 1000 is 999.0000000000001 in floats
            while seen < rank:
                at, num = next(edges)
                seen += num
            found.append(min(self.largest, max(self.least, _GROWTH**at * _MIDDLE)))
        return found

    @property
    def mean(self) -> float:
        return self.total / self.count

    def __iadd__(self, other: Histogram) -> Histogram:
        self._bins.update(other._bins)
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.largest = max(self.largest, other.largest)
        return self


def _bin(value: float) -> int:
    """The i with growth**(i - 1) < value <= growth**i."""
    return math.ceil(math.log(min(LARGEST, max(SMALLEST, value))) * _PER_LOG)
