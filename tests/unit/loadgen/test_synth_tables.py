"""Distributions as tables, and how close the ones of Azure LMM are to the plots that they were read from."""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.synth.published import COUNTS, SIZES
from triptych.loadgen.synth.tables import Counts, Sizes

PLOTS = Path(__file__).resolve().parents[4] / "shared" / "traces"
STEPS = 4000
tables = st.dictionaries(st.integers(0, 100), st.integers(1, 10**6), min_size=1, max_size=9).map(
    lambda drawn: dict(zip(sorted(drawn), sorted(drawn.values()), strict=True))
)


@given(tables, st.floats(0, 1), st.floats(0, 1))
def test_sizes_rise_and_meet_their_table(table: dict[float, float], u: float, v: float) -> None:
    sizes = Sizes(table)
    assert sizes.at(min(u, v)) <= sizes.at(max(u, v))
    assert min(table.values()) <= sizes.at(u) <= max(table.values())
    for percent, size in table.items():
        assert sizes.at(percent / 100) == pytest.approx(size, abs=1)


@pytest.mark.parametrize("table", [{}, {50: 0.5}, {-1: 3}, {101: 3}, {10: 5, 20: 4}, {50: 1e8}, {50: math.nan}, {math.nan: 5}])
def test_tables_that_are_none(table: dict[float, float]) -> None:
    with pytest.raises(ValueError, match="percentiles are of 0 to 100"):
        Sizes(table)


def test_counts_have_their_weights() -> None:
    counts = Counts({1: 3, 5: 1})
    assert [counts.at(u) for u in (0, 0.74, 0.76, 1)] == [1, 1, 5, 5]
    for wrong in ({}, {0: 1.0}, {1: 0.0}, {1: math.nan}, {1: math.inf}, {10**8: 1.0}):
        with pytest.raises(ValueError, match="counts are 1 to 10000000"):
            Counts(wrong)


def plot(name: str) -> list[tuple[float, float, float]]:
    """(value, lowest and highest percent of the line there)."""
    path = PLOTS / f"AzureLMM_digitized_cdf_{name}.csv"
    if not path.exists():
        pytest.skip("the figures that were read off the published plots are not here")
    with path.open() as file:
        return [(float(x), float(low), float(high)) for x, low, high in list(csv.reader(file))[1:]]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("azure-lmm-image-context", "ContextTokens_image"),
        ("azure-lmm-text-context", "ContextTokens_text"),
        ("azure-lmm-image-generated", "GeneratedTokens_image"),
        ("azure-lmm-text-generated", "GeneratedTokens_text"),
    ],
)
def test_sizes_are_the_plotted_ones(name: str, column: str) -> None:
    """Nowhere more than 2 points of the distribution away from the line, in the mean less than half a point."""
    drawn = [Sizes(SIZES[name]).at((step + 0.5) / STEPS) for step in range(STEPS)]
    off = []
    for value, low, high in plot(column):
        if value >= 2:  # the plot's axis begins below 1, where the line only starts
            below, upto = (100 * bisect_left(drawn, end) / STEPS for end in (value * 0.98, value * 1.02))
            off.append(max(0.0, low - upto, below - high))
    assert max(off) < 2
    assert sum(off) / len(off) < 0.5


def test_counts_are_the_plotted_ones() -> None:
    """Squares in the plot, read to 0.3 points. Of the roots: mean 2.78, p50 1, p90 5, p99 23."""
    counts = COUNTS["azure-lmm"]
    total = sum(counts.values())
    assert sum(count * weight for count, weight in counts.items()) / total == pytest.approx(2.78, rel=0.02)
    assert [Counts(counts).at(u) for u in (0.5, 0.9, 0.99)] == [1, 5, 23]
    for value, low, high in plot("NumImages"):
        root = math.sqrt(value)
        near = [100 * sum(w for count, w in counts.items() if count <= root + off) / total for off in (-0.2, 0.2)]
        assert near[0] - 0.6 <= high
        assert near[1] + 0.6 >= low
