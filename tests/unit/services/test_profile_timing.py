"""Rounds, medians and the budget, on a clock that the passes themselves move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from triptych.services.profiler.timing import MIN_PASSES, Effort, Pass, time_passes
from triptych.shared.cost_model.forms import PassWork


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, durations_s: Iterator[float]) -> Callable[[], float]:
        def once() -> float:
            duration_s = next(durations_s)
            self.now_s += duration_s
            return duration_s

        return once


def ignore(num_left: int) -> None:
    """No bar."""


def test_the_median_counts_and_the_warm_up_does_not() -> None:
    clock = Clock()
    timed = time_passes([Pass(PassWork(7), clock.run(iter([90.0, 1.0, 50.0, 2.0])))], Effort(3, 1000.0), ignore, clock)
    assert [(one.work, one.seconds) for one in timed] == [(PassWork(7), 2.0)]


def test_rounds_go_over_all_passes_small_ones_first() -> None:
    order: list[int] = []

    def run(size: int) -> Callable[[], float]:
        def once() -> float:
            order.append(size)
            return 1.0

        return once

    time_passes([Pass(PassWork(size), run(size)) for size in (3, 1, 2)], Effort(2, 1000.0), ignore, Clock())
    assert order == [1, 2, 3] * 3


def test_the_first_round_leaves_out_what_there_is_no_time_for() -> None:
    """Each takes 1 s; 30 s for two rounds that count and the warm-up: 10 s a round, and the pass that crosses it."""
    clock = Clock()
    passes = [Pass(PassWork(size), clock.run(repeat(1.0))) for size in range(1, 30)]
    timed = time_passes(passes, Effort(2, 30.0), ignore, clock)
    assert [one.work.num_tokens for one in timed] == list(range(1, 12))


def test_the_least_number_of_passes_is_measured_once_whatever_it_takes() -> None:
    clock = Clock()
    passes = [Pass(PassWork(size), clock.run(repeat(100.0))) for size in range(1, 30)]
    timed = time_passes(passes, Effort(5, 1.0), ignore, clock)
    assert len(timed) == MIN_PASSES
    assert clock.now_s == 2 * MIN_PASSES * 100.0  # the warm-up and one round


def test_a_machine_that_got_slower_ends_in_fewer_rounds() -> None:
    clock = Clock()
    passes = [Pass(PassWork(1), clock.run(chain([1.0], repeat(60.0)))) for _ in range(2)]
    time_passes(passes, Effort(9, 100.0), ignore, clock)
    assert clock.now_s == 2 + 2 * 60.0


@pytest.mark.parametrize("budget_s", [1.0, 1000.0])
def test_what_is_left_is_told_and_ends_at_none(budget_s: float) -> None:
    told: list[int] = []
    clock = Clock()
    passes = [Pass(PassWork(size), clock.run(repeat(1.0))) for size in range(1, 20)]
    time_passes(passes, Effort(2, budget_s), told.append, clock)
    assert told == sorted(told, reverse=True)
    assert told[-1] == 0
    assert told[0] == 19 * 3 - 1
