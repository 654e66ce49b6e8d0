"""The series over time: bounded, and the same as counting one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.replay_results import answered, failed
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.over_time import MAX_BINS, TimeBins

TIMES = st.floats(0, 50)
GAPS = st.lists(st.floats(0, 5), max_size=6)
REQUESTS = st.lists(st.tuples(TIMES, st.floats(0, 10), GAPS, st.integers(0, 2)), min_size=1, max_size=30)


def bins_of(outcomes: list[RequestOutcome], max_bins: int = MAX_BINS) -> TimeBins:
    bins = TimeBins(max_bins)
    for outcome in outcomes:
        bins.add(outcome, is_measured=outcome.error is None)
    return bins


def overlap_s(outcome: RequestOutcome, begin_s: float, end_s: float) -> float:
    return max(0.0, min(outcome.end_s, end_s) - max(outcome.sent_s, begin_s))


@given(REQUESTS, st.sampled_from((4, 7, MAX_BINS)))
def test_load_is_what_counting_gives(requests: list[tuple[float, float, list[float], int]], max_bins: int) -> None:
    outcomes = [answered(at_s, ttft_s, gaps_s, num_images) for at_s, ttft_s, gaps_s, num_images in requests]
    series = bins_of(outcomes, max_bins).series(["text", "image"])
    count, width_s = len(series.in_flight), series.width_s
    assert count <= max_bins
    assert math.log2(width_s) == int(math.log2(width_s))
    edges = [(index * width_s, (index + 1) * width_s) for index in range(count)]
    assert series.in_flight == pytest.approx(
        [sum(overlap_s(outcome, *edge) for outcome in outcomes) / width_s for edge in edges], abs=1e-6
    )
    for of_class in series.classes:
        arrivals = [outcome.scheduled_s for outcome in outcomes if outcome.request_class == of_class.name]
        assert of_class.num_arrivals == [sum(begin <= at < end for at in arrivals) for begin, end in edges]
    tokens = sum(series.output_tokens_per_s) * width_s
    assert tokens == pytest.approx(sum(outcome.num_output_tokens for outcome in outcomes))


def test_tokens_are_counted_when_they_come() -> None:
    series = bins_of([answered(0.0, 0.5, [0.1, 3.0])]).series(["text"])
    assert series.output_tokens_per_s == [2, 0, 0, 1]


def test_a_chunk_may_hold_several_tokens() -> None:
    packed = RequestOutcome(0, "text", 0, 0.0, 0.0, 3.0, 0.5, 2.5, (2.0,), num_output_tokens=8)
    assert bins_of([packed]).series(["text"]).output_tokens_per_s == [4, 0, 4, 0]


def test_ttft_by_arrival_and_failures_by_their_end() -> None:
    outcomes = [answered(0.0, 4.0), answered(0.1, 2.0), failed(0.2, "timeout", after_s=2.5), failed(0.3, "cancelled")]
    series = bins_of(outcomes).series(["text"])
    (text,) = series.classes
    assert text.num_arrivals == [4, 0, 0, 0, 0]
    assert text.ttft_p50_s[0] == pytest.approx(2.0, rel=0.01)
    assert text.ttft_p99_s == [pytest.approx(4.0, rel=0.01), None, None, None, None]
    assert series.num_errors == [0, 0, 1, 0, 0]


def test_a_run_of_a_week_is_no_longer_than_one_of_minutes() -> None:
    outcomes = [answered(hour * 3600.0, 1.0) for hour in range(7 * 24)]
    series = bins_of(outcomes).series(["text"])
    assert MAX_BINS / 2 <= len(series.in_flight) <= MAX_BINS
    assert sum(series.classes[0].num_arrivals) == len(outcomes)
