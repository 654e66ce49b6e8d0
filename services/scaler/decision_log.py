"""The last decisions about roles and instances: each with what it was made by, what was done, and what came of it. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from triptych.shared.decision_entry import ActionName, DecisionEntry, Look, Outcome, Result
from triptych.shared.policies.elastic.actions import Action, Advise, Decision, Drain, Launch, Switch

CAPACITY = 256  # chosen: about a quarter of a megabyte; an hour of a strategy that decides four times a minute
OUTCOMES_AFTER_S = (10.0, 60.0)  # chosen: a window of recent rates, and what attainment is measured over
ROLE_ORDER = ("encoder", "prefill", "decode")


@dataclass(slots=True)
class _Kept:
    """decided_s: on the policy's clock."""

    entry: DecisionEntry
    decided_s: float


@dataclass(slots=True)
class DecisionLog:
    """outcomes_after_s: when it is looked what came of a decision, ascending. Times are on the policy's clock, given."""

    capacity: int = CAPACITY
    outcomes_after_s: Sequence[float] = OUTCOMES_AFTER_S
    num_decisions: int = 0
    _kept: deque[_Kept] = field(default_factory=deque)

    def add(self, decision: Decision, before: Look, now_s: float, at: str) -> int:
        """Its number. at: wall-clock time, ISO 8601."""
        self.num_decisions += 1
        name, target, to = described(decision.action)
        terms = {name: value if math.isfinite(value) else None for name, value in decision.terms.items()}
        entry = DecisionEntry(self.num_decisions, at, name, target, to, decision.reason, terms, before)
        self._kept.append(_Kept(entry, now_s))
        if len(self._kept) > self.capacity:
            self._kept.popleft()
        return self.num_decisions

    def finish(self, number: int, result: Result, detail: str = "", took_s: float = 0.0) -> None:
        """What was done about it. One that is forgotten already stays so."""
        for kept in self._kept:
            if kept.entry.number == number:
                kept.entry = msgspec.structs.replace(kept.entry, result=result, detail=detail, took_s=took_s)

    def observe(self, now_s: float, look: Callable[[], Look]) -> None:
        """look: at the cluster now, which is the outcome of those decisions whose time has come."""
        for kept in self._kept:
            age_s, outcomes = now_s - kept.decided_s, kept.entry.outcomes
            if len(outcomes) < len(self.outcomes_after_s) and age_s >= self.outcomes_after_s[len(outcomes)]:
                outcome = Outcome(round(age_s, 3), look())
                kept.entry = msgspec.structs.replace(kept.entry, outcomes=(*outcomes, outcome))

    def latest(self, limit: int) -> tuple[DecisionEntry, ...]:
        """Oldest first."""
        return tuple(kept.entry for kept in self._kept)[-limit:] if limit > 0 else ()


def described(action: Action) -> tuple[ActionName, str, str]:
    """Its name, its target, and what becomes of that, in words."""
    match action:
        case Switch(instance_id, roles, group):
            return "switch", instance_id, f"{'+'.join(role for role in ROLE_ORDER if role in roles)} {group}".strip()
        case Launch(kind, group, count):
            return "launch", kind, f"{count} more {group}".strip()
        case Drain(instance_id):
            return "drain", instance_id, "leave"
        case Advise(wanted):
            counts = ", ".join(f"{one.count} {one.kind} {one.group}".strip() for one in wanted)
            return "advise", "cluster", counts
