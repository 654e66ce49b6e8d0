"""Who of a running batch gets a token in a step, and how long the step may let others compute first.

Ours. With a target for the mean time between a request's tokens, each token is due a target's time after the one before. An
output can spare what it is ahead by for every first token, and for those that take long also what it can catch up with its
next tokens. Where not all can be in time, the older ones stay so, rather than that all are late by a little: a step takes
longer the more outputs are in it. Pure; used by the decode role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MARGIN = 0.9  # chosen, of the target: tokens still have a way to go to their reader
NUM_TO_CATCH_UP = 24  # chosen: tokens in which an output may get in time again; most have as many to come
MAX_PATIENCE_S = 0.5  # chosen: no output should stand still for longer, whatever its mean is
UNTARGETED_PATIENCE_S = 0.1  # chosen
LEAST_FOR_LONG = 2.0  # chosen, of a step's time: what is waited for first tokens that take long, even where outputs are late
LOST_S = 1.0  # chosen: an output that is later than this is not expected to be in time again
MAX_SKIPPED_S = 1.0  # chosen: the longest time without a token for those who make way
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


class DecodePace:
    """Args:
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
        slack_s = self._least_slack_s(outputs, now_s) if self._tbt_s and self._unit_s else None
        if slack_s is None:
            return Step(list(outputs), self._untargeted_s(), self._untargeted_s())
        if slack_s >= 0:
            return self._waiting(outputs, now_s)
        first = sorted(outputs, key=lambda output: self._rank(output, now_s))
        return self._waiting(first[: max(int(self._tbt_s / self._unit_s - FIXED_COST), 1)], now_s)

    def _waiting(self, outputs: Sequence[Output], now_s: float) -> Step[Output]:
        """As long as the one that can spare least can, and for what takes long its share in any case."""
        for_long_s, for_brief_s = (
            min(max(self._least_slack_s(outputs, now_s, num_tokens) or 0.0, 0.0), MAX_PATIENCE_S)
            for num_tokens in (NUM_TO_CATCH_UP, 0)
        )
        return Step(list(outputs), max(for_long_s, LEAST_FOR_LONG * self._untargeted_s()), for_brief_s)

    def _untargeted_s(self) -> float:
        """Steps get half of the time at least."""
        return min(self._last_s, UNTARGETED_PATIENCE_S)

    def _step_s(self, num_outputs: int) -> float:
        return self._unit_s * (FIXED_COST + num_outputs)

    def _due_s(self, output: Paced) -> float:
        return output.arrived_at_s + (output.num_made + 1) * self._tbt_s

    def _least_slack_s(self, outputs: Sequence[Paced], now_s: float, num_to_catch_up: int = NUM_TO_CATCH_UP) -> float | None:
        """Until a step with all of these must begin for those that can be in time; None: none can. num_to_catch_up: of the
        tokens to come, those that may make up for it."""
        step_s = self._step_s(len(outputs))
        gain_s = max(self._tbt_s - step_s, 0.0)  # with each token that does not wait
        slacks_s = (
            due_s - now_s - step_s + gain_s * min(output.num_to_come - 1, num_to_catch_up)
            for output in outputs
            if now_s - (due_s := self._due_s(output)) <= LOST_S
        )
        return min(slacks_s, default=None)

    def _rank(self, output: Paced, now_s: float) -> int:
        """Who has waited for long; who has to be in this step, to be in time; who can skip it; who will be late anyway."""
        late_s = now_s - self._due_s(output)
        if now_s - output.stepped_at_s > MAX_SKIPPED_S:
            return 0
        if late_s > LOST_S:
            return 3
        return 1 if late_s > -2 * self._tbt_s else 2
