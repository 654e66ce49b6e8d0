"""Whether a request is let in: by the time to its first token, predicted from what waits, against its target. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.shared.policies.pace import Pace
from triptych.shared.policies.views import StageView

REFUSE_FACTOR = 2.0  # chosen: the prediction counts all that waits, also what the request will overtake
MAX_RETRY_AFTER_S = 30  # chosen: a queue that takes longer to shrink is shrunk by more instances


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a request has to do in one stage: num_tokens, by any of the candidates."""

    candidates: Sequence[StageView]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """retry_after_s: None when the request is let in; else whole seconds after which it should be tried again. predicted_s:
    time to its first token."""

    retry_after_s: int | None
    predicted_s: float
    reason: str


def admit(stages: Sequence[StageWork], target_s: float | None, longest_target_s: float = 0.0) -> Admission:
    """By the sum of its stages, each by the candidate that would be done first; a stage without candidates is somebody else's
    to refuse. A request is never refused for its own size: only when it would wait, and then too long.

    Args:
        target_s: until its first token; None: no promise, it is let in.
        longest_target_s: of any class of requests: those with shorter ones overtake them, so as much may wait.
    """
    waits_s = [_soonest_s(stage, 0) for stage in stages]
    predicted_s = sum(_soonest_s(stage, stage.num_tokens) for stage in stages)
    predicted = f"first token in {predicted_s:.3f} s, {sum(waits_s):.3f} s of them waiting"
    if target_s is None:
        return Admission(None, predicted_s, f"{predicted}; no target")
    allowed_s = REFUSE_FACTOR * max(target_s, longest_target_s)
    excess_s = min(predicted_s - allowed_s, sum(waits_s))
    if excess_s <= 0:
        return Admission(None, predicted_s, f"{predicted}; {allowed_s:.3f} s allowed")
    retry_after_s = min(max(1, math.ceil(excess_s)), MAX_RETRY_AFTER_S)
    return Admission(retry_after_s, predicted_s, f"{predicted}; only {allowed_s:.3f} s allowed")


def _soonest_s(stage: StageWork, num_tokens: int) -> float:
    pace = Pace.of(stage.candidates)
    return min((pace.finish_s(view, num_tokens) for view in stage.candidates), default=0.0)
