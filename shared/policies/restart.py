"""Whether and when a process that ended is started again. Used by the scaler for stages, by the launcher for servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0  # chosen: a slot that ran this long since its last crash starts with a clean record
FIRST_DELAY_S = 0.5  # chosen: second crash in the window; doubles with each more
MAX_DELAY_S = 10.0  # chosen: a repaired cause (a full disk, a missing file) is noticed soon


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """delay_s: seconds until the start; None: leave it ended."""

    delay_s: float | None
    reason: str


def decide_restart(is_expected: bool, crashes_s: Sequence[float], now_s: float) -> RestartDecision:
    """Ours. crashes_s: times of the slot's unexpected exits, this one included. The first restart is immediate, a slot that
    keeps crashing is tried for ever but at most every MAX_DELAY_S."""
    if is_expected:
        return RestartDecision(None, "it was drained")
    num_recent = sum(1 for at_s in crashes_s if now_s - at_s < WINDOW_S)
    if num_recent <= 1:
        return RestartDecision(0.0, "first crash in a while")
    delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_recent - 2, 16))
    return RestartDecision(delay_s, f"crash {num_recent} in {WINDOW_S:.0f} s")
