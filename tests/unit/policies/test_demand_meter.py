"""Rates from counts: averages without a seed, recent windows, peaks, attainment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.instance_info import Demand
from triptych.shared.policies.elastic.demand_meter import DemandMeter
from triptych.shared.policies.elastic.views import GroupDemand

TEXT_10 = {"text": Demand(num_requests=10, num_text_tokens=1000, num_output_tokens=500, num_ended=10, num_in_time=9)}


def after(meter: DemandMeter, *counts: Demand, step_s: float = 1.0) -> DemandMeter:
    for one in counts:
        meter = meter.add(meter.last_s + step_s, {"multimodal": one})
    return meter


def images(meter: DemandMeter) -> GroupDemand:
    return meter.demand()["multimodal"]


def test_the_first_second_is_measured_and_no_seed_that_lingers() -> None:
    meter = DemandMeter(100.0).add(101.0, TEXT_10)
    text = meter.demand()["text"]
    assert text.average.requests == text.recent.requests == pytest.approx(10.0)
    assert text.average.text_tokens == pytest.approx(1000.0)
    for second in range(102, 110):
        meter = meter.add(float(second), {})
    text = meter.demand()["text"]
    assert text.average.requests == pytest.approx(10 / 9, rel=0.05), "ten requests in nine seconds"
    assert text.recent.requests == pytest.approx(10 / 9)
    assert (text.attainment, text.num_ended) == (0.9, 10)
    assert images(meter) == GroupDemand()


def test_averages_follow_minutes_and_peaks_remember_them() -> None:
    meter = after(DemandMeter(0.0), *[Demand(num_requests=2, num_images=2)] * 600)
    assert images(meter).average.requests == pytest.approx(2.0)
    meter = after(meter, *[Demand(num_requests=2, num_images=10)] * 20)
    burst = images(meter)
    assert burst.recent.images == pytest.approx(10.0)
    assert burst.average.images == pytest.approx(2 + 8 * (1 - 2.718281828 ** (-20 / 120)), rel=0.02)
    assert burst.peak_images_per_request == pytest.approx(5.0)
    meter = after(meter, *[Demand(num_requests=2, num_images=2)] * 200)
    assert images(meter).peak_images_per_request == pytest.approx(5.0), "200 s ago"
    assert images(meter).recent.images == pytest.approx(2.0)
    meter = after(meter, *[Demand(num_requests=2, num_images=2)] * 200)
    assert images(meter).peak_images_per_request == pytest.approx(1.0), "forgotten"


def test_attainment_is_of_the_last_minute() -> None:
    meter = after(DemandMeter(0.0), *[Demand(num_ended=1)] * 100)
    assert images(meter).attainment == 0.0
    meter = after(meter, *[Demand(num_ended=1, num_in_time=1)] * 80)
    assert images(meter).attainment == 1.0
    assert after(meter, *[Demand()] * 200).demand()["multimodal"].attainment is None


def test_time_that_stands_still_is_ignored() -> None:
    meter = DemandMeter(5.0).add(6.0, TEXT_10)
    assert meter.add(6.0, TEXT_10) is meter
    assert meter.add(4.0, TEXT_10) is meter


@given(st.lists(st.tuples(st.floats(0.1, 40), st.integers(0, 50)), min_size=1, max_size=60))
def test_rates_lie_within_what_was_measured(steps: list[tuple[float, int]]) -> None:
    meter = DemandMeter(0.0)
    for seconds, num in steps:
        meter = meter.add(meter.last_s + seconds, {"text": Demand(num_requests=num)})
    text, each = meter.demand()["text"], [num / seconds for seconds, num in steps]
    for rate in (text.average.requests, text.recent.requests):
        assert min(each) - 1e-6 <= rate <= max(each) + 1e-6
    assert len(meter.groups["text"].windows) <= 30


@given(st.floats(0.2, 30), st.integers(1, 100))
def test_a_constant_load_is_told_as_it_is(seconds: float, num: int) -> None:
    meter = DemandMeter(0.0)
    for _ in range(30):
        meter = meter.add(meter.last_s + seconds, {"text": Demand(num_requests=num)})
    text = meter.demand()["text"]
    for rate in (text.average, text.recent):
        assert rate.requests == pytest.approx(num / seconds)
