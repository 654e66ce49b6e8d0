"""Token-aware autoscaling (ModServe, arXiv 2502.00937): as many instances of a kind as its tokens per second need.

On a period, and whenever too few requests are in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from triptych.shared.policies.elastic.actions import Decision
from triptych.shared.policies.elastic.needs import MIN_ATTAINMENT, are_late, average, expected, needed, rates_of
from triptych.shared.policies.elastic.replicas import Target, of_kind, scaled
from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ClusterView
from triptych.shared.policies.groups import ANY
from triptych.shared.policies.placement import ROLES_OF, Kind


def replicas(load: float, safe_share: float) -> int:
    """ceil(M_L / M_C), at least one. load: M_L over what one instance does when it never rests. safe_share: of that, what it
    does within the SLO."""
    return max(1, math.ceil(load / safe_share - 1e-9))


@dataclass(frozen=True, slots=True)
class ModServeScaling:
    """kinds: what instances are, each stage in one of them. safe_share: M_C as a share of what one computes when it never
    rests. rescale_s: the paper's five minutes. cooldown_s: after which a kind may shrink again."""

    scales: ClassVar[bool] = True
    kinds: tuple[Kind, ...] = ("encoder", "text")
    safe_share: float = 0.8  # chosen: two requests wait on average then (M/D/1), which an SLO factor of 5 forgives
    min_attainment: float = MIN_ATTAINMENT
    rescale_s: float = 300.0
    cooldown_s: float = 60.0  # chosen
    period_s: float = 5.0  # chosen: how soon attainment is noticed

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        is_due = memory.planned_at_s is None or view.now_s - memory.planned_at_s >= self.rescale_s
        is_late = any(are_late(demand, self.min_attainment) for demand in view.demand.values())
        if not (is_due or is_late):
            return [], memory
        why = f"less than {self.min_attainment:.0%} are in time" if is_late else f"every {self.rescale_s:.0f} s"
        targets = [self._target(view, kind, is_late) for kind in self.kinds]
        planned = replace(memory, planned_at_s=view.now_s) if is_due else memory
        return scaled(view, planned, targets, self.cooldown_s, why)

    def _target(self, view: ClusterView, kind: Kind, is_late: bool) -> Target:
        """By what is asked for on average; by what is to be expected now when that was too little, and before anything is taken
        away. What serves too late is never made less."""
        loads = []
        for which in (average, expected):
            by_stage = needed(rates_of(view, ANY, which), view.costs)
            loads.append(sum(by_stage[role] for role in ROLES_OF[kind]))
        usual, soon = loads
        wanted = replicas(max(loads) if is_late else usual, self.safe_share)
        count = len(of_kind(view, kind))
        if wanted < count:
            wanted = min(count, replicas(max(loads), self.safe_share))
        terms = {"M_L/M_C": usual, "M_L/M_C_soon": soon, "safe_share": self.safe_share, "num_instances": count}
        return Target(kind, wanted, terms, may_drain=not is_late)
