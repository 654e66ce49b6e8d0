"""Arrival times: the rate that was asked for, whatever it changes to and when, with the variation that was asked for."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.synth.arrivals import (
    STRATA,
    Arrivals,
    constant,
    gamma_levels,
    gaps,
    held,
    mean_rate,
    normal_levels,
    of_bursts,
    of_hours,
    together,
)
from triptych.loadgen.synth.workload import Burst, Client, Workload

CLIENT = Client(name="c", rate_per_s=2.0, output_tokens={50: 1}, text_tokens={50: 1})


def workload(client: Client, duration_s: float = 48.0, day_s: float = 24.0) -> Workload:
    return Workload(about="", duration_s=duration_s, day_s=day_s, client=(client,))


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_mean_and_variation(cv: float) -> None:
    drawn = list(islice(gaps(cv, Random(1)), 1, 40_001))
    assert fmean(drawn) == pytest.approx(1, abs=4 * cv / 200)  # the mean's sigma is cv / sqrt(40,000)
    assert pstdev(drawn) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("cv", [0.0, 1.0, 4.0])
def test_no_client_begins_with_a_burst(cv: float) -> None:
    """The count of the first seconds is what the rate says: a renewal process that starts with a request would have more."""
    counts = [sum(1 for _ in Arrivals(cv, Random(f"{cv} {seed}")).until(20, 1)) for seed in range(2000)]
    assert fmean(counts) == pytest.approx(20, abs=max(0.01, 4 * stdev(counts) / math.sqrt(len(counts))))


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 20)), min_size=1, max_size=8), st.sampled_from([0.0, 0.7, 3.0]))
def test_times_rise_within_their_pieces(pieces: list[tuple[float, float]], cv: float) -> None:
    arrivals, begin_s = Arrivals(cv, Random(0)), 0.0
    for length_s, rate in pieces:
        times = list(arrivals.until(begin_s + length_s, rate))
        assert all(a <= b for a, b in pairwise([begin_s, *times]))
        assert all(time < begin_s + length_s for time in times)
        assert rate or not times
        begin_s += length_s


def test_regular_arrivals_follow_the_rate() -> None:
    """cv 0: what is left of a gap goes on at the new rate."""
    arrivals = Arrivals(0, Random(3))
    slow, quick = list(arrivals.until(10, 1)), list(arrivals.until(20, 10))
    assert len(slow) == 10
    assert quick[0] - 10 == pytest.approx((1 - (10 - slow[-1])) / 10)
    assert [b - a for a, b in pairwise(quick)] == pytest.approx([0.1] * (len(quick) - 1))


def test_bursts_multiply_while_they_last() -> None:
    bursts = (Burst(0, 10, rate=2), Burst(5, 10, rate=3), Burst(20, 5, images=4))
    assert list(of_bursts(bursts, lambda burst: burst.rate)) == [(5, 2), (10, 6), (15, 3), (20, 1), (25, 1), (math.inf, 1)]
    assert [value for _, value in of_bursts(bursts, lambda burst: burst.images)] == [1, 1, 1, 1, 4, 1]


def test_together_has_a_piece_for_each_change() -> None:
    steps = together(iter([(1.0, 5.0), (4.0, 6.0), (math.inf, 7.0)]), iter([(4.0, 8.0), (math.inf, 9.0)]), constant(0.0))
    assert list(steps) == [(1.0, (5, 8, 0)), (4.0, (6, 8, 0)), (math.inf, (7, 9, 0))]


def test_hours_pass_with_the_day() -> None:
    client = Client(name="c", rate_per_s=1, output_tokens={50: 1}, text_tokens={50: 1}, hours="azure-lmm-image")
    first = list(islice(of_hours(client, workload(client)), 48))
    assert [end_s for end_s, _ in first] == [float(hour + 1) for hour in range(48)]
    assert first[16][1] == pytest.approx(1.45 * 1.27)  # 16:00 of the first day
    assert first[24 + 16][1] == pytest.approx(1.45 * 1.24)
    assert fmean(value for _, value in islice(of_hours(client, workload(client)), 7 * 24)) == pytest.approx(1, rel=0.01)


def test_mean_rate_counts_hours_bursts_and_turns() -> None:
    assert mean_rate(CLIENT, workload(CLIENT)) == pytest.approx(2)
    burst = Client(name="c", rate_per_s=2, output_tokens={50: 1}, text_tokens={50: 1}, burst=(Burst(0, 24, rate=3),))
    assert mean_rate(burst, workload(burst)) == pytest.approx(4)
    assert mean_rate(burst, workload(burst, duration_s=12)) == pytest.approx(6)


def test_levels() -> None:
    """Gamma levels have mean 1; every few normal levels cover the distribution."""
    drawn = list(islice(gamma_levels(0.5, Random(0)), 20_000))
    assert (fmean(drawn), pstdev(drawn) ** 2) == (pytest.approx(1, abs=0.03), pytest.approx(0.5, rel=0.1))
    normal = list(islice(normal_levels(Random(0)), STRATA))
    assert sum(level < 0 for level in normal) == STRATA / 2
    ends = [end_s for end_s, _ in islice(held(normal_levels(Random(0)), 100, Random(1)), 50)]
    assert all(50 <= b - a <= 150 for a, b in pairwise([0.0, *ends]))
