"""Figures of a report, on few requests whose figures are known, and on many beside numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from support.replay_results import CONDITIONS, answered, failed
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, LatencyLine, parse_slos
from triptych.loadgen.report.builder import ReportBuilder
from triptych.loadgen.report.figures import flat_figures
from triptych.loadgen.report.histogram import RELATIVE_ERROR
from triptych.loadgen.report.schema import ClassFigures, Report

CLOSE = RELATIVE_ERROR * 1.001


def report_of(outcomes: Iterable[RequestOutcome], conditions: Conditions = CONDITIONS) -> Report:
    builder = ReportBuilder(conditions)
    for outcome in outcomes:
        builder.add(outcome)
    return builder.report()


def class_of(report: Report, name: str) -> ClassFigures:
    (found,) = [figures for figures in report.classes if figures.name == name]
    return found


def test_each_latency_is_the_one_that_its_name_says() -> None:
    whole = report_of([answered(10.0, 2.0, [0.5, 1.5, 1.0], num_prompt_tokens=20)]).classes[0]
    flat = flat_figures(whole)
    expected = {"ttft_s": 2.0, "e2e_s": 5.0, "tbt_request_mean_s": 1.0, "input_s_per_token": 0.1, "output_s_per_token": 0.75}
    for figure, value in expected.items():
        assert [flat[f"{figure}.{part}"] for part in ("mean", "p50", "p99", "max")] == [pytest.approx(value)] * 4, figure
    assert whole.tbt_over_tokens_s is not None
    assert (whole.tbt_over_tokens_s.count, whole.tbt_over_tokens_s.mean, whole.tbt_over_tokens_s.max) == (3, 1.0, 1.5)


def test_latency_counts_from_the_scheduled_time_and_the_lag_is_told() -> None:
    late, never_sent = replace(answered(10.0, 2.0), sent_s=11.5), replace(failed(0.0, "cancelled"), sent_s=500.0)
    report = report_of([late, never_sent])
    assert report.classes[0].ttft_s is not None
    assert report.send_lag_s is not None
    assert report.classes[0].ttft_s.max == 2.0
    assert report.send_lag_s.max == 1.5
    assert any("The client was measured" in warning for warning in report.warnings)
    capped = report_of([late], replace(CONDITIONS, options={"concurrency": 4}))
    assert any("The concurrency cap held them back, or the client" in warning for warning in capped.warnings)
    assert not any("client" in warning for warning in report_of([answered(10.0, 2.0)]).warnings)


def test_percentiles_of_many_requests_are_those_of_numpy() -> None:
    rng = random.Random(5)
    outcomes = [
        answered(at_s / 10, rng.lognormvariate(-1, 1), [rng.paretovariate(1.5) / 50 for _ in range(rng.randint(0, 20))])
        for at_s in range(2000)
    ]
    flat = flat_figures(report_of(outcomes).classes[0])
    values = {
        "ttft_s": [outcome.ttft_s for outcome in outcomes],
        "e2e_s": [outcome.e2e_s for outcome in outcomes],
        "tbt_over_tokens_s": [gap for outcome in outcomes for gap in outcome.token_gaps_s],
        "tbt_request_mean_s": [np.mean(outcome.token_gaps_s) for outcome in outcomes if outcome.token_gaps_s],
    }
    for figure, exact in values.items():
        for level in (50, 90, 95, 99):
            # Nearest rank, one up or down where numpy's floats round the rank
            near = [np.percentile(np.array(exact, float), level, method=way) for way in ("lower", "higher")]
            assert near[0] * (1 - CLOSE) <= (flat[f"{figure}.p{level}"] or 0) <= near[1] * (1 + CLOSE), figure
        assert flat[f"{figure}.mean"] == pytest.approx(float(np.mean(np.array(exact, float))))
        assert flat[f"{figure}.max"] == pytest.approx(float(np.max(np.array(exact, float))))


def test_rates_and_tokens() -> None:
    cached = replace(answered(0.0, 1.0, [1.0] * 3, num_prompt_tokens=60), num_cached_tokens=30)
    report = report_of([cached, answered(5.0, 1.0, [4.0], num_images=1, num_prompt_tokens=40)])
    whole = report.classes[0]
    assert report.span_s == 10.0
    assert (whole.offered_per_s, whole.finished_per_s) == (0.4, 0.2)
    assert (whole.prompt_tokens_per_s, whole.output_tokens_per_s) == (10.0, 0.6)
    assert whole.cache_use == 0.3
    assert class_of(report, "text").cache_use == 0.5
    assert class_of(report, "image").output_tokens_per_s == 0.2


def test_classes_are_those_of_the_trace_and_by_number_of_pictures() -> None:
    counts = [0, 0, 1, 2, 2, 3, 4, 5, 8, 9, 16, 17, 100]
    report = report_of(answered(at_s, 0.1, num_images=count) for at_s, count in enumerate(counts))
    assert {figures.name: figures.num_requests for figures in report.classes} == {
        "all": 13,
        "text": 2,
        "image": 11,
        "1 picture": 1,
        "2 pictures": 2,
        "3 pictures": 1,
        "4 pictures": 1,
        "5-8 pictures": 2,
        "9-16 pictures": 2,
        "over 16 pictures": 2,
    }
    assert {curve.class_name for curve in report.curves} == {"all", "text", "image"}


def test_failed_cancelled_and_warm_up_requests_are_apart() -> None:
    warm_up = replace(answered(0.0, 50.0), is_warm_up=True)
    outcomes = [
        warm_up,
        answered(1.0, 0.1),
        failed(2.0, "http_429"),
        failed(3.0, "http_429"),
        failed(4.0, "timeout"),
        failed(5.0, "cancelled", after_s=900.0),
    ]
    report = report_of(outcomes)
    whole = report.classes[0]
    assert (whole.num_requests, whole.num_finished, whole.num_cancelled) == (4, 1, 1)
    assert whole.errors == {"http_429": 2, "timeout": 1}
    assert whole.ttft_s is not None
    assert whole.ttft_s.max == pytest.approx(0.1)
    assert report.span_s == 4.0
    assert report.warm_up is not None
    assert (report.warm_up.num_requests, report.warm_up.ttft_s and report.warm_up.ttft_s.max) == (1, 50.0)
    assert report.over_time is not None
    assert sum(report.over_time.classes[0].num_arrivals) == 6


def test_answers_known_and_right() -> None:
    answers = [True, True, False, None]
    whole = report_of(replace(answered(1.0, 1.0), is_right=is_right) for is_right in answers).classes[0]
    assert (whole.num_answers_known, whole.num_answers_right) == (3, 2)


def test_slo_class_wide_and_own_scaled() -> None:
    # Alone, a request takes 1 ms a token; the median one has 100 tokens
    isolated = Isolated(9, 0.1, LatencyLine(0.0, 0.001), 0.01, LatencyLine(0.01, 0.0))
    conditions = replace(CONDITIONS, slos=parse_slos(["ttft=2x,tbt=50ms"]), isolated={"text": isolated, "image": isolated})
    small_slow = answered(0.0, 0.15, [0.01], num_prompt_tokens=10)
    large_slow = answered(1.0, 1.5, [0.01], num_images=1, num_prompt_tokens=1000)
    stuttering = answered(2.0, 0.1, [0.2, 0.2])
    outcomes = [small_slow, large_slow, stuttering, failed(3.0, "timeout", after_s=7.0), failed(4.0, "cancelled")]
    whole = report_of(outcomes, conditions).classes[0]
    wide, own = whole.slo_class_wide, whole.slo_own_scaled
    assert wide is not None
    assert own is not None
    assert (wide.num_requests, wide.met, wide.met_ttft, wide.met_tbt) == (4, 0.25, 0.5, 0.5)
    assert (own.num_requests, own.met, own.met_ttft, own.met_tbt) == (4, 0.25, 0.5, 0.5)
    assert wide.goodput_per_s == own.goodput_per_s == 0.1
    image = class_of(report_of(outcomes, conditions), "image")
    assert (image.slo_class_wide and image.slo_class_wide.met, image.slo_own_scaled and image.slo_own_scaled.met) == (0.0, 1.0)


def test_a_class_without_limits_has_no_attainment() -> None:
    only_image = replace(CONDITIONS, slos=parse_slos(["image:ttft=1s"]))
    report = report_of([answered(0.0, 0.5), answered(0.0, 0.5, num_images=1)], only_image)
    assert class_of(report, "text").slo_class_wide is None
    assert class_of(report, "text").slo_own_scaled is None
    whole = report.classes[0].slo_class_wide
    assert whole is not None
    assert (whole.num_requests, whole.met) == (1, 1.0)
    unknown_factor = replace(CONDITIONS, slos=parse_slos(["ttft=5x"]))
    assert report_of([answered(0.0, 9.0)], unknown_factor).classes[0].slo_class_wide is None


@pytest.mark.parametrize(
    ("outcomes", "changes", "expected"),
    [
        ([], {}, "No request was measured."),
        ([failed(0.0, "connection")], {}, "No request finished"),
        ([answered(0.0, 1.0), failed(0.0, "timeout")], {}, "50 % of the requests failed"),
        ([answered(0.0, 1.0)], {}, "The run took 1 s"),
        ([answered(0.0, 1.0, num_prompt_tokens=0)], {}, "1 answers came without usage"),
        ([replace(answered(0.0, 1.0, [1.0]), num_output_tokens=8)], {}, "several tokens at once"),
        ([answered(0.0, 1.0), failed(0.0, "unfinished")], {}, "1 requests had not ended when the replay did."),
        ([failed(0.0, "unfinished")], {}, "1 requests had not ended when the replay did."),
        ([answered(0.0, 1.0), failed(0.0, "no_socket")], {}, "1 requests found no free socket on the machine that sent them"),
        ([replace(answered(0.0, 1.0), num_forced_tokens=2)], {}, "1 answers are shorter than in the trace"),
        ([replace(failed(0.0, ""), error=None)], {}, "1 answers had no text"),
        ([], {"ended": "running"}, "cut off"),
        ([], {"ended": "target_died", "message": "The target died."}, "The target died."),
        ([], {"notes": ("One more thing.",)}, "One more thing."),
        ([], {"num_malformed_rows": 3}, "3 malformed rows of the trace were left out."),
        (
            [],
            {"num_malformed_rows": 3, "malformed_rows": ("line 7: no number",)},
            "were left out. The first: line 7: no number.",
        ),
        (
            [answered(0.0, 1.0)],
            {"slos": parse_slos(["text:ttft=50ms"]), "isolated": {"text": Isolated(9, 0.1, LatencyLine(0.1, 0.0))}},
            "Most text requests miss their TTFT limit even alone: their isolated median is 100 ms.",
        ),
        (
            [answered(0.0, 1.0, num_images=1)],
            {"slos": parse_slos(["ttft=5x,tbt=1s"]), "isolated": {"text": Isolated(9, 0.1, LatencyLine(0.1, 0.0))}},
            "The isolated TTFT of image requests is unknown: their limit, a factor of it, is not applied.",
        ),
    ],
)
def test_what_a_reader_has_to_know_is_said(outcomes: list[RequestOutcome], changes: dict[str, object], expected: str) -> None:
    conditions = replace(CONDITIONS, **changes)  # type: ignore[arg-type]
    assert any(expected in warning for warning in report_of(outcomes, conditions).warnings)


def test_a_long_run_without_trouble_has_no_warning() -> None:
    assert report_of(answered(float(at_s), 0.1) for at_s in range(100)).warnings == []


def test_curves_end_where_less_than_one_request_is_beyond() -> None:
    report = report_of(answered(float(at_s), 0.1) for at_s in range(100))
    assert {(curve.figure, curve.class_name): report.curve_levels[len(curve.values) - 1] for curve in report.curves} == {
        (figure, name): 99.0 for figure in ("ttft_s", "e2e_s") for name in ("all", "text")
    }
