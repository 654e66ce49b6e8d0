"""The fit finds the costs that made the points, also through noise, and never a negative one."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.shared.cost_model.fit import fit_error, fit_pass, fit_stage
from triptych.shared.cost_model.forms import PassCosts, PassWork
from triptych.shared.cost_model.profile import TimedPass


def prefill_grid() -> list[PassWork]:
    grid = [(n, before) for n in (1, 16, 64, 128, 256, 512, 1024) for before in (0, 500, 2000)]
    one = [PassWork(n, 1, n * (before + n / 2), before + n) for n, before in grid]
    return one + [PassWork(b * n, b, b * n * n / 2, b * n) for b in (2, 8) for n in (16, 64)]


def decode_grid() -> list[PassWork]:
    return [PassWork(b, b, 0, b * context) for b in (1, 2, 4, 8, 16, 32, 64) for context in (32, 256, 1024)]


def measured(costs: PassCosts, works: list[PassWork], noise: float = 0.0) -> list[TimedPass]:
    rng = random.Random(7)
    return [TimedPass(work, costs.pass_s(work) * (1 + rng.uniform(-noise, noise))) for work in works]


LANGUAGE = PassCosts(0.004, 0.0002, 40.0, 0.0003, 2e-8, 3e-7)


def test_a_known_model_is_recovered() -> None:
    got = fit_pass(measured(LANGUAGE, prefill_grid()))
    assert got.knee_tokens == pytest.approx(40, rel=0.2)  # the search has steps
    assert got.token_s == pytest.approx(LANGUAGE.token_s, rel=0.02)
    assert got.pair_s == pytest.approx(LANGUAGE.pair_s, rel=0.1)
    assert fit_error(got, measured(LANGUAGE, prefill_grid())).p95 < 0.02


def test_a_known_model_is_recovered_through_noise() -> None:
    """10 % on each point; judged on points that it was not fitted to."""
    got = fit_pass(measured(LANGUAGE, prefill_grid(), noise=0.1))
    unseen = [PassWork(n, 1, n * (before + n / 2), before + n) for n in (32, 200, 700) for before in (100, 1000)]
    error = fit_error(got, measured(LANGUAGE, unseen))
    assert error.num_points == 6
    assert error.p95 < 0.1


def test_decode_recovers_its_context() -> None:
    """Tokens and sequences are the same in decode: their costs can't be told apart, their sum can."""
    costs = PassCosts(0.003, 0.0005, 12.0, context_s=4e-7)
    got = fit_pass(measured(costs, decode_grid(), noise=0.05))
    assert got.context_s == pytest.approx(costs.context_s, rel=0.2)
    assert fit_error(got, measured(costs, decode_grid())).p95 < 0.1


def test_a_pass_of_one_token_may_be_cheap() -> None:
    """As on a CPU, where it multiplies matrices with a vector."""
    costs = PassCosts(0.014, 0.002, context_s=4e-6, many_s=0.014)
    got = fit_pass(measured(costs, decode_grid(), noise=0.05))
    assert got.many_s == pytest.approx(costs.many_s, rel=0.2)
    assert fit_error(got, measured(costs, decode_grid())).p95 < 0.1


def test_without_a_pass_of_one_token_a_fixed_cost_is_fixed() -> None:
    works = [work for work in prefill_grid() if work.num_tokens > 1]
    got = fit_pass(measured(LANGUAGE, works, noise=0.05))
    assert got.many_s == 0
    assert got.fixed_s > 0


def test_work_with_tokens_alone() -> None:
    """Preprocess: fixed and per pixel."""
    costs = PassCosts(0.001, 5e-8)
    works = [PassWork(pixels) for pixels in (10_000, 100_000, 500_000, 2_000_000)]
    got = fit_pass(measured(costs, works))
    assert [got.pass_s(work) for work in works] == pytest.approx([costs.pass_s(work) for work in works], rel=1e-3)
    assert (got.sequence_s, got.pair_s, got.context_s) == (0, 0, 0)


def test_one_point_is_enough() -> None:
    point = TimedPass(PassWork(100, 1, 5000, 100), 0.25)
    assert fit_pass([point]).pass_s(point.work) == pytest.approx(0.25)


def test_errors_are_relative_to_what_was_measured() -> None:
    costs = PassCosts(fixed_s=0.0, token_s=1.0)
    points = [TimedPass(PassWork(100), 100.0), TimedPass(PassWork(100), 80.0), TimedPass(PassWork(100), 200.0)]
    error = fit_error(costs, points)
    assert (error.num_points, error.median) == (3, 0.25)
    assert error.p95 == pytest.approx(0.475)


@settings(max_examples=15)
@given(st.lists(st.floats(1e-5, 10), min_size=21, max_size=21))
def test_no_cost_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    points = [TimedPass(work, time_s) for work, time_s in zip(decode_grid(), seconds, strict=True)]
    assert min(astuple(fit_pass(points))) >= 0


def test_a_stage_is_judged_on_points_that_it_was_not_fitted_to() -> None:
    stage = fit_stage(measured(LANGUAGE, prefill_grid(), noise=0.05))
    held = [point for point in stage.points if point.is_held_out]
    assert stage.error == fit_error(stage.costs, held)
    assert stage.error.num_points == len(held) == len(stage.points) // 4
    assert stage.error.median < 0.1
    seconds = [point.seconds for point in stage.points]
    assert seconds == sorted(seconds)
    assert not stage.points[0].is_held_out
    assert not stage.points[-1].is_held_out


def test_a_wrong_form_shows_in_the_error() -> None:
    """Times that fall with the work: no costs that are not negative explain them."""
    works = decode_grid()
    points = [TimedPass(work, 1.0 / work.num_tokens**2) for work in works]
    assert fit_stage(points).error.median > 0.3


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="3 points are too few"):
        fit_stage(measured(LANGUAGE, prefill_grid()[:3]))
    assert fit_stage(measured(LANGUAGE, prefill_grid()[:4])).error.num_points == 1
