"""From wanted to actual instances: what is launched and drained, within limits, and not to and fro. Used by strategies that
scale.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.shared.policies.elastic.actions import Advise, Decision, Drain, Launch, Wanted
from triptych.shared.policies.elastic.strategy import History, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, Limits
from triptych.shared.policies.groups import ANY, Group
from triptych.shared.policies.placement import ROLES_OF, Kind


@dataclass(frozen=True, slots=True)
class Target:
    """How many instances of a kind and group there should be, at least one. terms: why. may_drain: whether fewer are surely
    enough."""

    kind: Kind
    wanted: int
    terms: Mapping[str, float]
    may_drain: bool = True
    group: Group = ANY

    @property
    def pool(self) -> tuple[Kind, Group]:
        return self.kind, self.group


def of_kind(view: ClusterView, kind: Kind, group: Group = ANY) -> list[ElasticInstance]:
    """Those with exactly the roles of the kind, and of that group, with those that start."""
    return [one for one in view.instances if one.roles == set(ROLES_OF[kind]) and one.group == group]


def late(past: History, view: ClusterView, cooldown_s: float) -> History:
    """What was wanted in the last cooldown_s and the time that a start takes."""
    return tuple((at_s, wanted) for at_s, wanted in past if view.now_s - at_s < cooldown_s + view.costs.startup_s)


def held(past: History, kind: Kind, group: Group) -> int:
    """The most that was wanted of late: fewer may be missed. Before the first round nobody knows."""
    counts = [one.count for _, wanted in past for one in wanted if (one.kind, one.group) == (kind, group)]
    return max(counts, default=sys.maxsize)


def scaled(
    view: ClusterView, memory: Memory, targets: Sequence[Target], cooldown_s: float, why: str
) -> tuple[list[Decision], Memory]:
    """What is lacking is launched at once, and counts from then on. What is too much is drained, down to what was wanted at any
    time in the last cooldown_s and the time that a start takes: an instance that is missed takes as long to come back. All
    within the view's limits; how many there are then is told as advice where it is new."""
    wanted = tuple(Wanted(target.kind, target.group, target.wanted) for target in targets)
    there = {target.pool: of_kind(view, *target.pool) for target in targets}
    past = memory.wanted or ((view.now_s, tuple(Wanted(*pool, len(members)) for pool, members in there.items())),)
    past = late(past, view, cooldown_s)
    if past and past[-1][1] == wanted:
        past = past[:-1]  # still wanted
    memory = replace(memory, wanted=(*past, (view.now_s, wanted)))
    if view.limits.min_instances == view.limits.max_instances:
        return [], memory
    counts = {pool: len(members) for pool, members in there.items()}
    launches, total = _launches(targets, counts, len(view.instances), view.limits)
    reasons = {target.pool: f"{why}: {target.wanted} {' '.join(target.pool).strip()} wanted" for target in targets}
    terms = {target.pool: target.terms for target in targets}
    changes = [Decision(Launch(*pool, num), reasons[pool], terms[pool]) for pool, num in launches.most_common()]
    for pool in [target.pool for target in targets if target.may_drain and target.pool not in launches]:
        surplus = counts[pool] - held(memory.wanted, *pool)
        leaving = least_busy(there[pool])[: max(0, min(surplus, total - view.limits.min_instances))]
        changes += [Decision(Drain(one.instance_id), reasons[pool], terms[pool]) for one in leaving]
        counts[pool] -= len(leaving)
        total -= len(leaving)
    after = tuple(Wanted(*pool, counts[pool] + launches[pool]) for pool in counts)
    advice = [] if after == memory.advised else [Decision(Advise(after), why, {_name(one): one.count for one in after})]
    return [*advice, *changes], replace(memory, advised=after)


def _launches(
    targets: Sequence[Target], counts: Mapping[tuple[Kind, Group], int], total: int, limits: Limits
) -> tuple[Counter[tuple[Kind, Group]], int]:
    """How many more of each, one by one to who lacks most, and how many instances there are then."""
    launches: Counter[tuple[Kind, Group]] = Counter()
    while total < limits.max_instances:
        lacking = {one.pool: one.wanted - counts[one.pool] - launches[one.pool] for one in targets}
        most = max(lacking, key=lambda pool: lacking[pool])
        if lacking[most] <= 0 and total >= limits.min_instances:
            break
        launches[most] += 1
        total += 1
    return launches, total


def _name(wanted: Wanted) -> str:
    return "_".join(filter(None, ("wanted", wanted.kind, wanted.group)))


def least_busy(instances: Sequence[ElasticInstance]) -> list[ElasticInstance]:
    """Ready ones; what decodes least has least to hand over."""
    ready = [one for one in instances if one.is_ready]
    return sorted(ready, key=lambda one: (sum(load.num_waiting + load.num_running for load in one.loads), one.instance_id))
