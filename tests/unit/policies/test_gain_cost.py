"""Gain and cost of a change of stage, against values worked out by hand, and the dispatch set."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.cost_model.forms import PassCosts
from triptych.shared.policies.elastic.gain_cost import DecodeSet, batches_s, cost, dispatch_set, gain

# A prefill batch takes 10 ms + 1 ms a token, and its tipping point is at 100 tokens; to keep tables by hand, hypot(0, T) = T.
PREFILL = PassCosts(fixed_s=0.01, token_s=0.001)
# A decode step takes 10 ms, 1 ms a sequence, and 10 us a token in context.
DECODE = PassCosts(fixed_s=0.01, token_s=0.0, sequence_s=0.001, context_s=1e-5)


@pytest.mark.parametrize(
    ("lengths", "before_s", "after_s", "expected"),
    [
        ([], 1.0, 0.5, 0.0),
        ([100], 1.0, 0.5, 0.005),  # 0.5 / 100
        ([100, 400], 1.2, 0.8, 0.005),  # 0.4 / 100 + 0.4 / 400 = 0.004 + 0.001
        ([50, 100, 200], 0.6, 0.4, 0.007),  # 0.2 / 50 + 0.2 / 100 + 0.2 / 200 = 0.004 + 0.002 + 0.001
    ],
)
def test_gain_by_hand(lengths: list[int], before_s: float, after_s: float, expected: float) -> None:
    assert gain(lengths, before_s, after_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("outputs", "migration_s", "slowdown_s", "w", "expected"),
    [
        ([], 1.0, 1.0, 1.0, 0.0),
        ([100.0], 0.2, 3.0, 0.1, 0.005),  # (0.2 + 0.3) / 100
        ([100.0, 50.0], 0.2, 3.0, 0.1, 0.015),  # 0.5 / 100 + 0.5 / 50
        ([100.0], 0.2, 75.0, 0.004, 0.005),  # the weight of the public code: (0.2 + 0.3) / 100
        ([20.0, 40.0, 80.0], 0.4, 9.0, 0.0, 0.035),  # no weight, migration alone: 0.02 + 0.01 + 0.005
    ],
)
def test_cost_by_hand(outputs: list[float], migration_s: float, slowdown_s: float, w: float, expected: float) -> None:
    assert cost(outputs, migration_s, slowdown_s, w) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "num_slots", "tipping", "expected"),
    [
        ([], 1000, 100.0, 0),
        ([30, 30, 30], 1000, 100.0, 3),
        ([30, 30, 30, 30, 30], 1000, 100.0, 4),  # 90 are below the tipping point, 120 are not
        ([500, 30], 1000, 100.0, 1),  # beyond it alone, and it goes all the same
        ([30, 80, 30], 100, 1e9, 1),  # 30 + 80 do not fit; the third would, but it came later
        ([200], 100, 1e9, 0),
    ],
)
def test_the_dispatch_set(lengths: list[int], num_slots: int, tipping: float, expected: int) -> None:
    assert dispatch_set(lengths, num_slots, tipping) == expected


def test_batches_are_cut_at_the_tipping_point() -> None:
    assert batches_s([], PREFILL) == 0.0
    assert batches_s([100, 200], PREFILL) == pytest.approx(0.11 + 0.21)  # without a tipping point each is a batch of its own
    knee = PassCosts(fixed_s=0.01, token_s=0.001, knee_tokens=250.0)
    first_s, second_s = 0.01 + 0.001 * math.hypot(250, 300), 0.01 + 0.001 * math.hypot(250, 300)
    assert batches_s([100, 200, 300], knee) == pytest.approx(first_s + second_s)


def test_decode_steps_by_hand() -> None:
    decode = DecodeSet(num_sequences=8, num_context_tokens=8000, output_tokens=100.0, num_slots=10_000)
    assert decode.step_s(DECODE, 2) == pytest.approx(0.01 + 0.004 + 0.04)
    assert decode.step_s(DECODE, 1) == pytest.approx(0.01 + 0.008 + 0.08)
    assert decode.slowdown_s(DECODE, 2, 1) == pytest.approx(50 * (0.098 - 0.054))  # half of the output is still to come
    assert decode.slowdown_s(DECODE, 1, 2) == pytest.approx(-2.2)


def test_outputs_without_kv_slots_take_turns() -> None:
    decode = DecodeSet(num_sequences=8, num_context_tokens=8000, output_tokens=100.0, num_slots=4000)
    assert decode.step_s(DECODE, 2) == pytest.approx(0.054), "all fit"
    assert decode.step_s(DECODE, 1) == pytest.approx(2 * 0.054), "half of them at a time"


lengths = st.lists(st.integers(1, 500), max_size=20)


@given(lengths, st.integers(0, 3000), st.floats(0, 800))
def test_the_dispatch_set_fits_and_only_its_last_crosses_the_tipping_point(
    waiting: list[int], num_slots: int, tipping: float
) -> None:
    count = dispatch_set(waiting, num_slots, tipping)
    assert 0 <= count <= len(waiting)
    assert sum(waiting[:count]) <= num_slots
    assert count <= 1 or sum(waiting[: count - 1]) < tipping
    if count < len(waiting):
        assert sum(waiting[: count + 1]) > num_slots or sum(waiting[:count]) >= tipping


@given(st.integers(0, 500), st.integers(0, 50_000), st.integers(1, 8), st.integers(0, 20_000))
def test_more_instances_never_decode_slower(num_sequences: int, num_context: int, num: int, num_slots: int) -> None:
    decode = DecodeSet(num_sequences, num_context, 80.0, num_slots)
    assert decode.slowdown_s(DECODE, num, num + 1) <= 1e-9
    assert decode.slowdown_s(DECODE, num + 1, num) >= -1e-9
