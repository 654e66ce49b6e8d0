"""Who is let in, and when the others should try again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.stage_views import View, view, views
from triptych.shared.policies.admission import MAX_RETRY_AFTER_S, REFUSE_FACTOR, StageWork, admit


def test_the_prediction_is_the_sum_of_the_stages_by_their_soonest_candidates() -> None:
    encoders = [view("a", tokens=3000, pace=1000.0), view("b", tokens=1000, pace=1000.0)]
    prefills = [view("c", tokens=500, pace=2000.0)]
    admission = admit([StageWork(encoders, 500), StageWork(prefills, 1000)], 2.0)
    assert admission.predicted_s == 1.5 + 0.75
    assert admission.retry_after_s is None


def test_a_long_queue_refuses_until_it_has_shrunk() -> None:
    work = [StageWork([view("a", tokens=9500, pace=1000.0)], 500)]
    assert admit(work, None).retry_after_s is None
    assert admit(work, 5.0).retry_after_s is None
    refused = admit(work, 1.0)
    assert refused.retry_after_s == 8, "10 s, and 2 are allowed"
    assert "9.500 s of them waiting" in refused.reason


def test_who_overtakes_is_not_refused_for_what_it_overtakes() -> None:
    work = [StageWork([view("a", tokens=9500, pace=1000.0)], 500)]
    assert admit(work, 1.0, longest_target_s=5.0).retry_after_s is None
    assert admit(work, 1.0, longest_target_s=4.0).retry_after_s == 2


def test_nobody_is_refused_for_their_own_size() -> None:
    assert admit([StageWork([view("a", pace=1000.0)], 50_000)], 1.0).retry_after_s is None
    assert admit([StageWork([view("a", tokens=200, pace=1000.0)], 50_000)], 1.0).retry_after_s == 1
    assert admit([StageWork([], 50_000)], 1.0).retry_after_s is None


@given(views, st.integers(0, 9999), st.floats(0.01, 100.0))
def test_retry_after_is_bounded_and_only_said_when_it_is_too_late(
    candidates: list[View], num_tokens: int, target_s: float
) -> None:
    admission = admit([StageWork(candidates, num_tokens)], target_s)
    if admission.retry_after_s is None:
        return
    assert 1 <= admission.retry_after_s <= MAX_RETRY_AFTER_S
    assert admission.predicted_s > REFUSE_FACTOR * target_s
