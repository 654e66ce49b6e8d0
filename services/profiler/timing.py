"""Times the passes of one stage in rounds, so that a busy moment of the machine hurts all of them, and takes medians.

The first round warms up, smallest pass first, and finds out what there is time for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.shared.cost_model.forms import PassWork
from triptych.shared.cost_model.profile import TimedPass

MIN_PASSES = 8  # chosen: two of them are held out, and six fit five costs


@dataclass(frozen=True, slots=True)
class Pass:
    """run: does the work once and returns the seconds that it took."""

    work: PassWork
    run: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly: rounds that count, and about how long one stage may take."""

    num_rounds: int
    stage_budget_s: float


def time_passes(
    passes: Sequence[Pass], effort: Effort, tick: Callable[[int], None], clock: Callable[[], float]
) -> list[TimedPass]:
    """The median of each pass that there was time for: MIN_PASSES, and each further one whose round fits in the budget.

    Args:
        tick: called after each run with the number of runs that are still to come.
        clock: seconds.
    """
    began_s = clock()
    kept: list[Pass] = []
    ordered = sorted(passes, key=lambda one: (one.work.num_tokens, one.work.num_context_tokens))
    for one in ordered:
        if len(kept) >= MIN_PASSES and clock() - began_s > effort.stage_budget_s / (effort.num_rounds + 1):
            break
        one.run()
        kept.append(one)
        tick(len(ordered) * (effort.num_rounds + 1) - len(kept))
    seconds: list[list[float]] = [[] for _ in kept]
    for round_ in range(effort.num_rounds):
        if round_ and clock() - began_s > effort.stage_budget_s:
            break
        for done, (one, its) in enumerate(zip(kept, seconds, strict=True)):
            its.append(one.run())
            tick(len(kept) * (effort.num_rounds - round_) - done - 1)
    tick(0)
    return [TimedPass(one.work, statistics.median(its)) for one, its in zip(kept, seconds, strict=True)]
