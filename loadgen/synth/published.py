"""Numbers of published traces, by the names that workload files use.

Azure LMM inference trace 2025 (github.com/Azure/AzurePublicDataset, CC-BY 4.0; ModServe, arXiv 2502.00937), read off the plots
of its notebook: percentiles good to about 3 %, counts of pictures to 0.3 points.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Rates(NamedTuple):
    """Relative to the mean: hours 0 to 11 and 12 to 23, UTC; days from the one on which the trace begins."""

    of_morning: tuple[float, ...]
    of_afternoon: tuple[float, ...]
    of_days: tuple[float, ...]

    def at(self, hour: int) -> float:
        """hour: counted from midnight of the first day."""
        return (self.of_morning + self.of_afternoon)[hour % 24] * self.of_days[hour // 24 % 7]


def _table(text: str) -> dict[float, float]:
    return {float(key): float(value) for key, value in (entry.split(":") for entry in text.split())}


# Percent of the requests -> tokens.
SIZES: Mapping[str, Mapping[float, float]] = MappingProxyType(
    {
        "azure-lmm-image-context": _table(
            "0:240 1:250 2:259 5:340 10:426 15:647 20:709 25:865 30:956 40:1137 50:1413 60:2006 65:2700 70:3718 75:4012 "
            "80:4714 85:6315 90:9427 92.5:10250 95:21914 97:32931 98:34633 99:51110 99.5:90594 99.9:122181 100:130078"
        ),
        "azure-lmm-text-context": _table(
            "0:45 0.5:53 1:74 2:112 5:136 10:174 15:258 20:307 25:364 30:436 40:602 50:785 60:990 70:1276 75:1458 80:1755 "
            "85:2201 90:3100 95:4114 97:5751 98:7283 99:12575 99.5:22536 99.9:77108 100:78248"
        ),
        "azure-lmm-image-generated": _table(
            "0:1 1.5:1 2:3 5:8.9 10:14.4 15:24.5 20:27.3 25:32.4 30:39.6 40:55.9 50:79.4 60:105 70:142 75:178 80:258 85:328 "
            "90:403 95:507 97:587 98:645 99:774 99.5:948 99.9:1448 100:1469"
        ),
        "azure-lmm-text-generated": _table(
            "0:1 5:1 10:7.7 15:11.1 20:16.4 25:25.6 30:44.5 40:84.6 50:145 55:187 60:196 70:209 75:218 80:245 85:326 90:473 "
            "95:760 97:927 98:1009 99:1243 99.5:1556 99.9:3143 100:3188"
        ),
    }
)

# Pictures of a request that has any -> percent of such requests; the roots of the trace's NumImages. The last two stand for
# the 0.3 % from 24 to 96. Mean 2.8, median 1, p90 5, p99 23.
COUNTS: Mapping[str, Mapping[int, float]] = MappingProxyType(
    {
        "azure-lmm": {
            int(count): percent
            for count, percent in _table(
                "1:66.07 2:4.62 3:14.88 4:1.93 5:4.91 6:0.3 7:0.6 10:1.34 12:0.15 14:0.45 15:0.44 16:0.3 18:0.3 20:0.3 21:0.74 "
                "22:0.9 23:1.47 30:0.25 60:0.05"
            ).items()
        }
    }
)

# From the series of requests per minute, 15 October 2024 (a Tuesday) 12:00 to 22 October 12:00.
RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "azure-lmm-image": Rates(
            of_morning=(0.7, 0.85, 0.73, 0.8, 0.96, 0.76, 0.7, 0.97, 1.46, 0.89, 0.96, 0.92),
            of_afternoon=(0.91, 1.01, 1.1, 1.26, 1.45, 1.35, 1.18, 1.19, 1.18, 1.07, 0.88, 0.71),
            of_days=(1.27, 1.24, 1.13, 0.83, 0.67, 0.61, 1.24),
        ),
        "azure-lmm-text": Rates(
            of_morning=(1.17, 1.19, 1.18, 1.24, 1.03, 0.96, 1.15, 1.21, 1.27, 1.11, 0.99, 0.96),
            of_afternoon=(0.94, 0.9, 0.94, 0.79, 0.85, 0.92, 0.76, 0.86, 0.78, 0.93, 0.97, 0.92),
            of_days=(1.02, 1.11, 1.36, 1.51, 0.72, 0.45, 0.84),
        ),
    }
)
