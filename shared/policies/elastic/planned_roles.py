"""Our own elasticity: roles are planned for the load of minutes; bursts overflow to instances that can do both.

Three kinds: instances that only encode, as many as encoding keeps busy on average; some that do everything, for what goes up
and down; the others leave pictures alone. Between plans the gain-cost rule may give an instance roles in addition, inside a
small budget. Where instances can be launched, staffing.py decides instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.actions import Decision
from triptych.shared.policies.elastic.gain_cost import PUBLIC_W
from triptych.shared.policies.elastic.group_work import GroupWork
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.needs import average, expected, needed, peak, rates_of
from triptych.shared.policies.elastic.replicas import Target, scaled
from triptych.shared.policies.elastic.rounds import Round
from triptych.shared.policies.elastic.staffing import FEW_A_MINUTE, Staffing, staffed
from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance
from triptych.shared.policies.groups import ANY
from triptych.shared.policies.placement import ROLES_OF, Kind

KINDS: tuple[Kind, ...] = ("encoder", "instance", "text")
OVERFLOWS: tuple[tuple[Role, Role], ...] = (("encoder", "decode"), ("prefill", "encoder"))  # what waits, and who may lose by it


PICTURES_APART = Staffing()


def held(now: int, low: int, high: int) -> int:
    """The nearest number from low to high: what is in between stays as it is."""
    return max(low, min(now, max(low, high)))


@dataclass(frozen=True, slots=True)
class Planned:
    """slack: of square-root staffing. plan_s: how often roles are planned. overflow_s: what waits for longer is given instances
    between plans. scaling: of a pool whose size may change."""

    slack: float = 1.0  # chosen: the chance to wait is about 0.2 then
    period_s: float = 2.0  # chosen: of looking for overflow
    plan_s: float = 20.0  # chosen: a few seconds of waiting are overflow's
    overflow_s: float = 3.0  # chosen: several isolated TTFTs; 1 and 2 moved more and served less when simulated
    scaling: Staffing = PICTURES_APART
    w: float = PUBLIC_W
    hysteresis: Hysteresis = FEW_A_MINUTE

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        if view.limits.min_instances < view.limits.max_instances:
            return self.scaling.decide(view, memory)
        rates = rates_of(view, ANY)
        output_tokens = rates.output_tokens / rates.requests if rates.requests else 0.0
        work = GroupWork.of(ANY, [replace(one, group=ANY) for one in view.instances], view.costs, output_tokens, self.w)
        left = self.hysteresis.num_left(memory, view.now_s)
        this = Round(view, {ANY: work}, self.hysteresis, left)
        this.cover(work)
        decisions: list[Decision] = []
        if memory.planned_at_s is None or view.now_s - memory.planned_at_s >= self.plan_s:
            targets = self._plan(view, this)
            memory = replace(memory, planned_at_s=view.now_s)
            after = replace(view, instances=tuple(work.members))
            decisions, memory = scaled(after, memory, targets, 0.0, "planned")  # the pool is fixed: advice only
        else:
            self._overflow(this, work)
        spent = left - max(0, this.num_left)
        return [*this.decisions, *decisions], self.hysteresis.spend(memory, view.now_s, spent)

    def _plan(self, view: ClusterView, this: Round) -> list[Target]:
        """Switches instances to the kinds that are wanted, and says how many of each there should be."""
        usual, soon, most = (needed(rates_of(view, ANY, which), view.costs) for which in (average, expected, peak))
        count = len(view.instances)
        encoders = held(self._count(view, "encoder"), math.floor(usual["encoder"] - 0.5), math.floor(usual["encoder"] + 0.5))
        able = held(
            self._count(view, "encoder", "instance"),
            staffed(usual["encoder"], self.slack),
            staffed(max(soon["encoder"], most["encoder"]), self.slack),
        )
        text = staffed(usual["prefill"] + usual["decode"], self.slack)
        able = held(able, 1, max(1, count - self._calm(usual)))
        encoders = held(encoders, 0, max(0, min(able, count - text, count - 1)))
        terms = {
            **{f"{role}_load": load for role, load in usual.items()},
            "encoder_load_soon": soon["encoder"],
            "slack": self.slack,
        }
        kinds = {"encoder": encoders, "instance": able - encoders, "text": count - able}
        self._assign(this, kinds, terms)
        return [Target(kind, kinds[kind], terms) for kind in KINDS]

    def _calm(self, usual: Mapping[Role, float]) -> int:
        """Instances that never encode, so that decoding is not held up everywhere."""
        return staffed(usual["decode"], self.slack)

    def _count(self, view: ClusterView, *kinds: Kind) -> int:
        return sum(_kind_of(one) in kinds for one in view.instances)

    def _assign(self, this: Round, kinds: Mapping[Kind, int], terms: Mapping[str, float]) -> None:
        """The fewest switches: those that only encode first, then those that also do, each with least text to do first."""
        members = sorted(
            this.groups[ANY].members, key=lambda one: (KINDS.index(_kind_of(one)), _text_work(one), one.instance_id)
        )
        wanted = [kind for kind in KINDS for _ in range(kinds[kind])]
        for one, kind in zip(members, wanted, strict=False):
            if kind != _kind_of(one) and this.num_left > 0 and this.movable([one]):
                counted = ", ".join(f"{kinds[name]} {name}" for name in KINDS)
                reason = f"planned for the load of minutes: {counted}"
                this.switch(one, ANY, frozenset(ROLES_OF[kind]), reason, terms)

    def _overflow(self, this: Round, work: GroupWork) -> None:
        """What waits for too long gets instances with other roles, in addition, while that gains more than it costs."""
        calm = self._calm(needed(rates_of(this.view, ANY), this.view.costs))
        for role, others in OVERFLOWS:
            most = len(work.members) - (calm if role == "encoder" else 0)
            while this.num_left > 0 and (num := len(work.servers(role))) and work.compute_s(role, num) > self.overflow_s:
                able = [one for one in this.movable(work.members) if role not in one.roles]
                gain, price = work.gain_of(role), work.cost_of(others)
                if not able or num >= most or gain.value <= price.value:
                    break
                one = min(able, key=lambda one: (one.load(others).num_pending_tokens, one.instance_id))
                terms = {"gain": gain.value, "cost": price.value, **price.terms, **gain.terms}
                reason = f"{role} work waits: gains {gain.value:.2g} for {price.value:.2g} s a token"
                this.switch(one, ANY, one.roles.union(ROLES_OF["instance"]), reason, terms)


def _kind_of(instance: ElasticInstance) -> Kind:
    """What it counts as: with pictures and text, with one of them."""
    if "encoder" not in instance.roles:
        return "text"
    return "encoder" if len(instance.roles) == 1 else "instance"


def _text_work(instance: ElasticInstance) -> int:
    return instance.load("prefill").num_pending_tokens + instance.load("decode").num_pending_tokens
