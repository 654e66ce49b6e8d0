"""Who gets a token in a decode step, and how long the step waits for others."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.policies.decode_pace import (
    FIXED_COST,
    LEAST_FOR_LONG,
    LOST_S,
    MARGIN,
    MAX_PATIENCE_S,
    MAX_SKIPPED_S,
    UNTARGETED_PATIENCE_S,
    DecodePace,
)

TBT_S = 0.1
UNIT_S = 0.004  # of a step, for each output and for what a step costs at all


@dataclass(slots=True, eq=False)
class Output:
    arrived_at_s: float
    num_made: int = 0
    num_to_come: int = 1
    stepped_at_s: float = 0.0
    ended_at_s: float = 0.0

    @property
    def mean_tbt_s(self) -> float:
        return (self.ended_at_s - self.arrived_at_s) / self.num_made


def step_s(num_outputs: int) -> float:
    return UNIT_S * (FIXED_COST + num_outputs)


def paced(tbt_s: float = TBT_S, num_outputs: int = 4) -> DecodePace:
    pace = DecodePace(tbt_s)
    pace.note(num_outputs, step_s(num_outputs))
    return pace


def decoded(pace: DecodePace, outputs: list[Output]) -> list[float]:
    """All to their end, while first tokens that take long are always waited for: the longest time that each was without a
    token."""
    now_s, gaps_s = 0.0, dict.fromkeys(outputs, 0.0)
    running = list(outputs)
    while running:
        step = pace.next_step(running, now_s)
        spent_s = step_s(len(step.outputs))
        pace.note(len(step.outputs), spent_s)
        now_s += spent_s
        for output in step.outputs:
            gaps_s[output] = max(gaps_s[output], now_s - output.stepped_at_s)
            output.num_made += 1
            output.num_to_come -= 1
            output.stepped_at_s = output.ended_at_s = now_s
        running = [output for output in running if output.num_to_come]
    return list(gaps_s.values())


def test_without_a_target_all_go_and_steps_get_half_of_the_time() -> None:
    pace, outputs = DecodePace(0.0), [Output(0.0), Output(0.0)]
    assert pace.next_step(outputs, 1.0).for_long_s == 0, "nothing was measured"
    pace.note(2, 0.03)
    step = pace.next_step(outputs, 1.0)
    assert (step.outputs, step.for_long_s, step.for_brief_s) == (outputs, 0.03, 0.03)
    pace.note(2, 3.0)
    assert pace.next_step(outputs, 1.0).for_long_s == UNTARGETED_PATIENCE_S


def test_outputs_that_are_ahead_can_spare_it() -> None:
    outputs = [Output(0.0, num_made=10), Output(0.0, num_made=9)]
    spare_s = 10 * MARGIN * TBT_S - 0.7 - step_s(2)
    step = paced().next_step(outputs, 0.7)
    assert step.outputs == outputs
    assert abs(step.for_brief_s - spare_s) < 1e-9, "what the one that is least ahead can"
    assert paced().next_step(outputs, 0.0).for_long_s == MAX_PATIENCE_S


def test_outputs_can_spare_what_they_will_catch_up() -> None:
    def patience_s(num_to_come: int) -> float:
        return paced().next_step([Output(0.0, num_to_come=num_to_come), Output(0.0, num_to_come=100)], 0.0).for_long_s

    gain_s = MARGIN * TBT_S - step_s(2)
    step = paced().next_step([Output(0.0, num_to_come=100)] * 2, 0.0)
    assert abs(step.for_brief_s - gain_s) < 1e-9, "not for those that are soon there anyway"
    assert abs(patience_s(1) - LEAST_FOR_LONG * step_s(4)) < 1e-9, "one that ends now can't: no more than anybody"
    assert abs(patience_s(3) - 3 * gain_s) < 1e-9
    assert patience_s(100) == MAX_PATIENCE_S


def test_who_is_late_waits_for_what_takes_long_alone() -> None:
    """Which would else take twice as long: what it is as late by anyway is less."""
    step = paced().next_step([Output(0.0, num_made=10), Output(0.0, num_made=5)], 0.7)
    assert step.for_brief_s == 0
    assert abs(step.for_long_s - LEAST_FOR_LONG * step_s(4)) < 1e-9


def test_of_too_many_the_older_ones_stay_in_time() -> None:
    outputs = [Output(0.0, num_to_come=60) for _ in range(30)]
    assert step_s(len(outputs)) > TBT_S, "all at once would all be late"
    gaps_s = decoded(paced(), outputs)
    in_time = [output.mean_tbt_s <= TBT_S for output in outputs]
    assert in_time == sorted(in_time, reverse=True)
    assert sum(in_time) >= 0.45 * len(outputs)
    assert max(gaps_s) <= MAX_SKIPPED_S + 2 * step_s(len(outputs)), "and nobody stands still"


def test_as_many_as_can_be_in_time_all_are() -> None:
    outputs = [Output(0.0, num_to_come=60) for _ in range(14)]
    decoded(paced(), outputs)
    assert all(output.mean_tbt_s <= TBT_S for output in outputs)


def test_who_will_be_late_anyway_holds_up_nobody() -> None:
    outputs = [Output(-LOST_S - 2 * TBT_S), Output(0.0, num_made=5)]
    step = paced().next_step(outputs, 0.1)
    assert step.outputs == outputs, "there is time for both"
    assert step.for_long_s > 0
    lost = paced().next_step(outputs[:1], 0.1)
    assert (lost.for_long_s, lost.for_brief_s) == (LEAST_FOR_LONG * step_s(4), 0.0), "as others that are late"


@given(
    st.lists(
        st.builds(Output, st.floats(0, 10), st.integers(0, 100), st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=40
    ),
    st.floats(10, 20),
    st.floats(0.001, 1),
    st.floats(0.001, 3),
)
def test_somebody_always_goes_and_no_wait_is_long(outputs: list[Output], now_s: float, tbt_s: float, spent_s: float) -> None:
    pace = DecodePace(tbt_s)
    pace.note(len(outputs), spent_s)
    step = pace.next_step(outputs, now_s)
    assert step.outputs
    assert len(set(map(id, step.outputs))) == len(step.outputs)
    assert all(output in outputs for output in step.outputs)
    assert 0 <= step.for_long_s <= MAX_PATIENCE_S
