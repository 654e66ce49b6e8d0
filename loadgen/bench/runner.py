"""Measures several sides in turn, so that a busy moment of the machine hurts all of them, and takes medians.

Called by each benchmark; a side is a function that measures once.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from triptych.shared.console import progress_console
from triptych.shared.machine import cpu_name, num_cores

Side = Callable[[], Awaitable[Mapping[str, float]]]
Medians = dict[str, dict[str, float]]
MIN_RUNS = 3  # fewer have no median worth the name


class BenchFailed(Exception):
    """Something that a user can read kept a benchmark from measuring."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to measure. is_quick: tiny sizes, one run, no bars: whether it works, not how fast it is."""

    num_runs: int = MIN_RUNS
    is_quick: bool = False

    @property
    def runs(self) -> int:
        return 1 if self.is_quick else self.num_runs


async def alternate(sides: Mapping[str, Side], num_runs: int, num_warmups: int = 0) -> Medians:
    """Each side's medians by figure. Every other round goes backwards: what gets slower or faster hurts all alike.

    Args:
        num_warmups: rounds before those that count.
    """
    seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}
    for round_ in range(num_warmups + num_runs):
        order = list(sides) if round_ % 2 == 0 else list(sides)[::-1]
        for name in order:
            measured = await sides[name]()
            if round_ >= num_warmups:
                seen[name].append(measured)
    return {name: _medians(measured) for name, measured in seen.items()}


def _medians(measured: list[Mapping[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(one[figure] for one in measured) for figure in measured[0]}


def machine() -> dict[str, object]:
    """What a figure depends on besides the code, for `Report.conditions`."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def tell(line: str) -> None:
    """Progress, for people who watch or read a log; never on stdout."""
    progress_console().print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
