"""From wanted to actual instances: what is launched and drained, within limits and cooldown. Used by strategies that scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.shared.policies.elastic.actions import Advise, Decision, Drain, Launch, Wanted
from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance
from triptych.shared.policies.groups import ANY
from triptych.shared.policies.placement import ROLES_OF, Kind


@dataclass(frozen=True, slots=True)
class Target:
    """How many instances of a kind there should be, at least one. terms: why. may_drain: whether fewer are surely enough."""

    kind: Kind
    wanted: int
    terms: Mapping[str, float]
    may_drain: bool = True


def of_kind(view: ClusterView, kind: Kind) -> list[ElasticInstance]:
    """Those with exactly the roles of the kind, with those that start."""
    return [one for one in view.instances if one.roles == set(ROLES_OF[kind])]


def scaled(
    view: ClusterView, memory: Memory, targets: Sequence[Target], cooldown_s: float, why: str
) -> tuple[list[Decision], Memory]:
    """Launches come at once, kinds that lack most first: what is launched counts from then on. Drains wait for cooldown_s and
    the time that a start takes since the kind was last scaled, since an instance that is missed takes as long to come back. All
    within the view's limits, and told as advice where it is new."""
    decisions: list[Decision] = []
    wanted = tuple(Wanted(target.kind, ANY, target.wanted) for target in targets)
    if wanted != memory.advised:
        decisions.append(Decision(Advise(wanted), why, {f"wanted_{one.kind}": one.count for one in wanted}))
    memory = replace(memory, advised=wanted)
    if view.limits.min_instances == view.limits.max_instances:
        return decisions, memory
    total, scaled_at_s = len(view.instances), dict(memory.scaled_at_s)
    lacking = {target.kind: target.wanted - len(of_kind(view, target.kind)) for target in targets}
    first = max(lacking, key=lambda kind: lacking[kind])
    lacking[first] = max(lacking[first], view.limits.min_instances - total)
    for target in sorted(targets, key=lambda one: -lacking[one.kind]):
        kind, reason = target.kind, f"{why}: {target.wanted} {target.kind} wanted"
        more = max(0, min(lacking[kind], view.limits.max_instances - total))
        if more:
            decisions.append(Decision(Launch(kind, ANY, more), reason, target.terms))
        has_rested = view.now_s - scaled_at_s.get(kind, -math.inf) >= cooldown_s + view.costs.startup_s
        surplus = min(-lacking[kind], total - view.limits.min_instances) if target.may_drain and has_rested else 0
        leaving = _least_busy(of_kind(view, kind))[: max(0, surplus)]
        decisions += [Decision(Drain(one.instance_id), reason, target.terms) for one in leaving]
        if more or leaving:
            scaled_at_s[kind] = view.now_s
            total += more - len(leaving)
    return decisions, replace(memory, scaled_at_s=scaled_at_s)


def _least_busy(instances: Sequence[ElasticInstance]) -> list[ElasticInstance]:
    """Ready ones; what decodes least has least to hand over."""
    ready = [one for one in instances if one.is_ready]
    return sorted(ready, key=lambda one: (sum(load.num_waiting + load.num_running for load in one.loads), one.instance_id))
