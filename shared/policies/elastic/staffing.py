"""Pools of instances, each for some stages of some requests, with as many instances as their work of the last seconds keeps
busy, and head-room by its square root. What there are moves between the pools; where more can be started, they are. Ours; used
by `triptych`, whose pools are others where no more can be, and by the monolith that is scaled alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.actions import Decision, Switch
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.needs import ahead, are_late, needed, rates_of
from triptych.shared.policies.elastic.replicas import Target, held, late, of_kind, scaled
from triptych.shared.policies.elastic.strategy import History, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT, Group
from triptych.shared.policies.placement import ROLES_OF, Kind

FEW_A_MINUTE = Hysteresis(dwell_s=20.0, max_switches=8, window_s=60.0)  # chosen


def staffed(load: float, slack: float) -> int:
    """Square-root staffing: load + slack * sqrt(load) instances keep the chance to wait the same at any load (Halfin and Whitt,
    Operations Research 29, 1981)."""
    return math.ceil(load + slack * math.sqrt(load) - 1e-9)


@dataclass(frozen=True, slots=True)
class Pool:
    """Instances of one kind and group. work: what they do, stages and whose requests. slack: of square-root staffing."""

    kind: Kind
    group: Group
    work: Mapping[Role, Group] = field(hash=False)
    slack: float

    def load(self, view: ClusterView) -> float:
        """Instances that its work will keep busy by the time that another one has started."""
        soon = ahead(view.costs.startup_s)
        return sum(needed(rates_of(view, group, soon), view.costs)[role] for role, group in self.work.items())

    def is_late(self, view: ClusterView) -> bool:
        """Whether too few of its group's requests are in time."""
        return any(are_late(demand) for group, demand in view.demand.items() if self.group in (group, ANY))

    def headroom(self, load: float, num_instances: int) -> float:
        """In units of slack: 1 where it is staffed."""
        return (num_instances - load) / (self.slack * math.sqrt(load)) if load > 0 else math.inf

    def fewest(self, load: float, headroom: float) -> int:
        """Instances with more head-room than that, at least one."""
        return max(1, math.floor(load + headroom * self.slack * math.sqrt(load)) + 1)


# Steps of pictures are long, and those of text, whose first token is due soon, wait for none of them. Decoding is where no
# long step is. Slacks: the least that kept 99 % in time on four seeds of `tides` in the tests' simulation
APART = (
    Pool("prompt", MULTIMODAL, {"encoder": MULTIMODAL, "prefill": MULTIMODAL}, slack=1.3),
    Pool("text", TEXT, {"prefill": TEXT, "decode": ANY}, slack=2.0),
)
# Where no instance is saved by leaving it idle, those for pictures also prefill text that would wait longer elsewhere: so text
# needs less of its own. Slacks: of 1 to 2 and 0.5 to 2 the best under `bursts`, `image-light` and a drifting mix, simulated
SHARED = (replace(APART[0], group=ANY, slack=2.0), replace(APART[1], slack=1.0))
WHOLE = (Pool("instance", ANY, {"encoder": ANY, "prefill": ANY, "decode": ANY}, slack=3.8),)
Loads = Mapping[Pool, float]


@dataclass(frozen=True, slots=True)
class Staffing:
    """fixed: the pools where the number of instances may not change. cooldown_s: for so long, and as a start takes, fewer
    instances must have been enough before some are drained."""

    scales: ClassVar[bool] = True
    pools: tuple[Pool, ...] = APART
    fixed: tuple[Pool, ...] = SHARED
    period_s: float = 5.0  # chosen
    cooldown_s: float = 10.0  # chosen: 30 in a simulation kept 4 % more instances and no more requests in time
    hysteresis: Hysteresis = FEW_A_MINUTE

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        if is_fixed(view):  # who moves is there as soon as roles are switched
            view = replace(view, costs=replace(view.costs, startup_s=view.costs.role_switch_s))
        loads = {pool: pool.load(view) for pool in (self.fixed if is_fixed(view) else self.pools)}
        switches, view = self._moved(view, memory, loads)
        memory = self.hysteresis.spend(memory, view.now_s, len(switches))
        can_join = len(view.instances) >= len(loads) and not all(_is_in_pool(one, loads) for one in view.instances)
        if can_join and not memory.wanted and not switches:
            return [], memory  # at first all join, once they may: then it is seen how many there are
        targets = [self._target(view, pool, load) for pool, load in loads.items()]
        decisions, memory = scaled(view, memory, targets, self.cooldown_s, "staffed")
        return [*switches, *decisions], memory

    def _target(self, view: ClusterView, pool: Pool, load: float) -> Target:
        """At least one. One more where too few are in time all the same."""
        is_late = pool.is_late(view)
        wanted = max(1, staffed(load, pool.slack)) + is_late
        return Target(pool.kind, wanted, {"M_L/M_C": load, "slack": pool.slack, "is_late": float(is_late)}, group=pool.group)

    def _moved(self, view: ClusterView, memory: Memory, loads: Loads) -> tuple[list[Decision], ClusterView]:
        """Instances of no pool join one; what one has too much of goes to one that lacks it, sooner than another one starts. A
        pool that has nobody left gets one from any that has two."""
        members = {pool: of_kind(view, pool.kind, pool.group) for pool in loads}
        strays = [one for one in view.instances if not _is_in_pool(one, loads)]
        decisions: list[Decision] = []
        past = late(memory.wanted, view, self.cooldown_s)
        is_enough = len(view.instances) >= len(loads)  # for all stages
        for _ in range(self.hysteresis.num_left(memory, view.now_s) if is_enough else 0):
            headroom = {pool: pool.headroom(loads[pool], len(those)) for pool, those in members.items()}
            taker = min(loads, key=lambda pool: (bool(members[pool]), headroom[pool]))
            is_lacking = not members[taker] or headroom[taker] < 1
            least = _least(view, past, loads, headroom[taker]) if members[taker] else dict.fromkeys(loads, 1)
            givers = [those for pool, those in members.items() if is_lacking and len(those) > least[pool]]
            able = [one for those in (strays, *givers) for one in those if self.hysteresis.may_switch(one, view.now_s)]
            if not able:
                break
            one = replace(able[0], roles=frozenset(ROLES_OF[taker.kind]), group=taker.group, is_ready=False)
            for those in (strays, *givers):
                those[:] = [other for other in those if other is not able[0]]
            members[taker].append(one)
            terms = {f"headroom_{pool.kind}": value for pool, value in headroom.items()}
            decisions.append(Decision(Switch(one.instance_id, one.roles, one.group), f"{taker.kind} lacks head-room", terms))
        return decisions, replace(view, instances=(*strays, *(one for those in members.values() for one in those)))


def is_fixed(view: ClusterView) -> bool:
    """Whether the number of instances may not change."""
    return view.limits.min_instances == view.limits.max_instances


def _least(view: ClusterView, past: History, loads: Loads, lowest_headroom: float) -> Mapping[Pool, int]:
    """What pools keep. Where no other instances come, who gives has more head-room afterwards than who takes has now."""
    if is_fixed(view):
        return {pool: pool.fewest(load, min(1.0, lowest_headroom)) for pool, load in loads.items()}
    return {pool: held(past, pool.kind, pool.group) for pool in loads}


def _is_in_pool(instance: ElasticInstance, pools: Iterable[Pool]) -> bool:
    return any((instance.roles, instance.group) == (frozenset(ROLES_OF[pool.kind]), pool.group) for pool in pools)
