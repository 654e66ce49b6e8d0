"""Percentiles of a histogram are those of the values, within the error that it states."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.report.histogram import LARGEST, RELATIVE_ERROR, SMALLEST, Histogram

QUARTERS = (0.0, 25.0, 50.0, 75.0, 100.0)  # floats that numpy ranks exactly: of 1000 values it takes p99.9 for the last
LEVELS = (0.0, 1.0, 50.0, 90.0, 95.0, 99.0, 99.9, 100.0)
ROUNDING = 1e-9  # of floats, beside the stated error
VALUES = st.lists(st.floats(SMALLEST, LARGEST), min_size=1, max_size=200)


def histogram_of(values: Sequence[float]) -> Histogram:
    histogram = Histogram()
    histogram.add_all(values)
    return histogram


def check(values: Sequence[float]) -> None:
    histogram = histogram_of(values)
    for levels, exact in (
        (QUARTERS, np.percentile(np.array(values), QUARTERS, method="inverted_cdf")),
        (LEVELS, np.sort(values)[[max(1, math.ceil(Fraction(str(level)) * len(values) / 100)) - 1 for level in LEVELS]]),
    ):
        assert histogram.percentiles(levels) == pytest.approx(exact.tolist(), rel=RELATIVE_ERROR + ROUNDING)
    assert histogram.mean == pytest.approx(math.fsum(values) / len(values))
    assert (histogram.count, histogram.least, histogram.largest) == (len(values), min(values), max(values))


@given(VALUES)
def test_any_values(values: list[float]) -> None:
    check(values)


def test_what_latencies_look_like() -> None:
    rng = random.Random(1)
    for draw in (
        lambda: rng.lognormvariate(-3, 2),
        lambda: rng.paretovariate(1.1),
        lambda: rng.choice((0.01, 60.0)) * rng.random() + 1e-6,
        lambda: rng.uniform(1.0, 1.0001),
    ):
        check([draw() for _ in range(5000)])


def test_edges_of_bins_and_values_next_to_them() -> None:
    growth = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
    edges = [growth**power for power in range(-300, 300)]
    check([near for edge in edges for near in (edge, math.nextafter(edge, 0), math.nextafter(edge, math.inf))])


@pytest.mark.parametrize("values", [[0.25], [0.25] * 1000, [1e-9, 1e9], [1.0] * 99 + [100.0], [1.0] * 999 + [100.0]])
def test_few_and_equal_values(values: list[float]) -> None:
    check(values)


def test_percentile_99_of_a_hundred_is_the_second_largest() -> None:
    (p99,) = histogram_of([*range(1, 100), 1000]).percentiles((99,))
    assert p99 == pytest.approx(99, rel=RELATIVE_ERROR)


@given(VALUES, VALUES)
def test_a_sum_is_the_histogram_of_all(some: list[float], others: list[float]) -> None:
    summed = histogram_of(some)
    summed += histogram_of(others)
    whole = histogram_of(some + others)
    assert summed.percentiles(LEVELS) == whole.percentiles(LEVELS)
    assert (summed.count, summed.least, summed.largest) == (whole.count, whole.least, whole.largest)
    assert summed.mean == pytest.approx(whole.mean)


def test_zero_negative_and_enormous_values_are_kept_apart() -> None:
    histogram = histogram_of([-1.0, 0.0, 1.0, 1e300])
    assert histogram.count == 4
    least, half, three_quarters, most = histogram.percentiles((0, 50, 75, 100))
    assert 0 <= least <= half <= SMALLEST * (1 + RELATIVE_ERROR)
    assert three_quarters == pytest.approx(1.0, rel=RELATIVE_ERROR)
    assert most == pytest.approx(LARGEST, rel=RELATIVE_ERROR)


def test_memory_is_bounded_by_the_bins() -> None:
    histogram = histogram_of([SMALLEST * 1.0001**power for power in range(500_000)])
    assert len(histogram._bins) <= math.log(LARGEST / SMALLEST) / math.log1p(2 * RELATIVE_ERROR) + 20


def test_an_empty_one_has_no_percentiles() -> None:
    with pytest.raises(ValueError, match="no values"):
        Histogram().percentiles((50,))
