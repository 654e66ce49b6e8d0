"""Who of a running batch gets a token in a step, and how long the step may let others compute first.

Ours. With a target for the mean time between a request's tokens, each token is due a target's time after the one before. An
output can spare what it is ahead by for every first token, and for those that take long also what it can catch up with its
next tokens. Where not all can be in time, the older ones stay so, rather than that all are late by a little: a step takes
longer the more outputs are in it. Pure; used by the decode role.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MARGIN = 0.9  # chosen, of the target: tokens still have a way to go to their reader
NUM_TO_CATCH_UP = 24  # chosen: tokens in which an output may get in time again; most have as many to come
MAX_PATIENCE_S = 0.5  # chosen: no output should stand still for longer, whatever its mean is
UNTARGETED_PATIENCE_S = 0.1  # chosen: at most, and no longer than the last step took, so that steps get half of the time
LEAST_FOR_LONG = 4.0  # chosen, of that: what is waited for first tokens that take long, even where outputs are late by it
LOST_S = 1.0  # chosen: an output that is later than this is not expected to be in time again
MAX_SKIPPED_S = 1.0  # chosen: who had no token for so long is in the next step, which may wait, too
FIXED_COST = 6.0  # of a step, in outputs: measured for 1 to 16 of 800 tokens, one core (17, 27, 43 ms for 4, 8, 16)
_MEMORY = 0.8  # chosen: of what steps before took


class Paced(Protocol):
    """An output. arrived_at_s: here, with num_made tokens since then, the last one at stepped_at_s. num_to_come: at most."""

    @property
    def arrived_at_s(self) -> float: ...

    @property
    def num_made(self) -> int: ...

    @property
    def num_to_come(self) -> int: ...

    @property
    def stepped_at_s(self) -> float: ...


Output = TypeVar("Output", bound=Paced)


@dataclass(frozen=True, slots=True)
class Step(Generic[Output]):
    """outputs: that get a token. for_long_s, for_brief_s: how long it may wait for first tokens that take long, and for those
    that do not."""

    outputs: list[Output]
    for_long_s: float
    for_brief_s: float


@dataclass(frozen=True, slots=True)
class _Slack:
    """Until a step must begin: when outputs catch up with their next tokens, and when they do not."""

    with_catching_up_s: float
    as_it_is_s: float


class DecodePace:
    """Of one decode instance; it learns from its steps what they take.

    Args:
        tbt_s: target of the mean time between tokens; 0: none.
    """

    def __init__(self, tbt_s: float) -> None:
        self._tbt_s = MARGIN * tbt_s
        self._unit_s = 0.0  # what a step takes, less by FIXED_COST, for each output
        self._last_s = 0.0

    def note(self, num_outputs: int, spent_s: float) -> None:
        """What a step took, without waiting."""
        unit_s = spent_s / (FIXED_COST + num_outputs)
        self._unit_s = _MEMORY * self._unit_s + (1 - _MEMORY) * unit_s if self._unit_s else unit_s
        self._last_s = spent_s

    def next_step(self, outputs: Sequence[Output], now_s: float) -> Step[Output]:
        """outputs: all that could get a token, oldest first."""
        least_s = min(self._last_s, UNTARGETED_PATIENCE_S)
        chosen = list(outputs)
        if not (self._tbt_s and self._unit_s):
            return Step(chosen, least_s, least_s)
        slack = self._slack(chosen, now_s)
        if slack.with_catching_up_s < 0:
            chosen = sorted(outputs, key=lambda output: self._rank(output, now_s))[: self._num_in_time()]
            slack = self._slack(chosen, now_s)
        for_long_s = min(slack.with_catching_up_s, MAX_PATIENCE_S)
        for_brief_s = min(max(slack.as_it_is_s, 0.0), MAX_PATIENCE_S)
        return Step(chosen, max(for_long_s, LEAST_FOR_LONG * least_s), for_brief_s)

    def _num_in_time(self) -> int:
        """Outputs of a step that takes the target's time."""
        return max(int(self._tbt_s / self._unit_s - FIXED_COST), 1)

    def _step_s(self, num_outputs: int) -> float:
        return self._unit_s * (FIXED_COST + num_outputs)

    def _due_s(self, output: Paced) -> float:
        return output.arrived_at_s + (output.num_made + 1) * self._tbt_s

    def _slack(self, outputs: Sequence[Paced], now_s: float) -> _Slack:
        """Of a step with all of these, by those that can be in time; none, where none can."""
        step_s = self._step_s(len(outputs))
        gain_s = max(self._tbt_s - step_s, 0.0)  # with each token that does not wait
        in_time = [output for output in outputs if now_s - self._due_s(output) <= LOST_S]
        if not in_time:
            return _Slack(0.0, 0.0)
        spare_s = [self._due_s(output) - now_s - step_s for output in in_time]
        gains_s = [gain_s * min(output.num_to_come - 1, NUM_TO_CATCH_UP) for output in in_time]
        return _Slack(min(map(operator.add, spare_s, gains_s)), min(spare_s))

    def _rank(self, output: Paced, now_s: float) -> int:
        """Who has waited for long; who has to be in this step, to be in time; who can skip it; who will be late anyway."""
        late_s = now_s - self._due_s(output)
        if now_s - output.stepped_at_s > MAX_SKIPPED_S:
            return 0
        if late_s > LOST_S:
            return 3
        return 1 if late_s > -2 * self._tbt_s else 2
