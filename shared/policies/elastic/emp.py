"""Elastic Multimodal Parallelism (ElasticMM, arXiv 2507.10069): groups of instances for text and for pictures, stages in each.

Idle instances go where a burst would hurt most, or at once where something waits; else an instance changes its stage or its
group when that gains more than it costs. Deviations from the paper are in docs/decisions.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.actions import Decision
from triptych.shared.policies.elastic.burst_tolerance import GroupShare, grants
from triptych.shared.policies.elastic.gain_cost import PUBLIC_W
from triptych.shared.policies.elastic.group_work import GroupWork, Price
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.needs import needed, rates_of, recent
from triptych.shared.policies.elastic.rounds import Round
from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance
from triptych.shared.policies.groups import ANY, Group

SOME_A_MINUTE = Hysteresis(dwell_s=30.0, max_switches=12, window_s=60.0)  # chosen
CALM_TOLERANCE = 5.0  # chosen: a burst of five times the average, the most that traces show in a minute, hurts nobody then
MIN_IMPROVEMENT = 1.1  # chosen: of the lowest burst tolerance, below which no instance changes its group for it


@dataclass(frozen=True, slots=True)
class _Offer:
    """An instance for a stage of a group that is short of it. is_free: nobody needs it where it is."""

    group: GroupWork
    role: Role
    giver: GroupWork
    instance: ElasticInstance
    is_free: bool
    gain: Price
    cost: Price

    @property
    def value(self) -> float:
        return self.gain.value - self.cost.value

    @property
    def order(self) -> tuple[bool, float, bool, str]:
        return self.is_free, self.value, self.giver is self.group, self.instance.instance_id

    @property
    def terms(self) -> dict[str, float]:
        return {"gain": self.gain.value, "cost": self.cost.value, **self.cost.terms, **self.gain.terms}


@dataclass(frozen=True, slots=True)
class ElasticMMScaling:
    """w: weight of slower decoding against migration and faster prompts. is_coupled: encoding is a part of prefill.
    shortage_s: what waits for longer is a shortage. grow_at, shrink_to: of the TBT target and of KV slots, beyond which decode
    grows, and up to which it does with fewer instances."""

    scales: ClassVar[bool] = False  # the paper's instances change their stages and groups, and stay as many
    w: float = PUBLIC_W
    is_coupled: bool = False
    period_s: float = 1.0  # chosen: two heartbeats
    hysteresis: Hysteresis = SOME_A_MINUTE
    shortage_s: float = 1.5  # chosen: three times what a switch takes (role_switch_s)
    grow_at: float = 0.9  # chosen
    shrink_to: float = 0.6  # chosen

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        names = dict.fromkeys(instance.group for instance in view.instances)
        groups = {name: self._group(view, name) for name in names}
        left = self.hysteresis.num_left(memory, view.now_s)
        this = Round(view, groups, self.hysteresis, left)
        for group in groups.values():
            this.cover(group)
            this.part(group)
        while this.num_left > 0 and (offer := max(self._offers(this), key=lambda one: one.order, default=None)):
            words = "is free" if offer.is_free else f"gains {offer.gain.value:.2g} for {offer.cost.value:.2g} s a token"
            where = offer.group.name or "all"
            reason = f"{where} {offer.role} is short of instances: a {_role(offer.instance)} one {words}"
            this.switch(offer.instance, offer.group.name, offer.group.roles_of(offer.role), reason, offer.terms)
        self._balance(this)
        return this.decisions, self.hysteresis.spend(memory, view.now_s, left - max(this.num_left, 0))

    def _group(self, view: ClusterView, name: Group) -> GroupWork:
        members = [one for one in view.instances if one.group == name]
        rates = rates_of(view, name)
        output_tokens = rates.output_tokens / rates.requests if rates.requests else 0.0
        return replace(GroupWork.of(name, members, view.costs, output_tokens, self.w), is_coupled=self.is_coupled)

    def _offers(self, this: Round) -> Iterator[_Offer]:
        """For each shortage: of each group the first free instance, and of each of its stages the least affected one, if that
        pays."""
        short = [(group, role) for group in this.groups.values() for role in group.stages if self._is_short(group, role)]
        for group, role in short:
            gain = group.gain_of(role)
            for giver in this.groups.values() if gain.value > 0 else ():
                free = [one for one in self._free(this, giver) if giver is not group or role not in one.roles]
                if free:
                    migration_s = giver.migration_s(free[0])
                    yield _Offer(group, role, giver, free[0], True, gain, Price(0.0, {"M_s": migration_s}))
                for stage in giver.stages:
                    offer = None if giver is group and stage == role else self._preempted(this, giver, stage)
                    if offer is not None and gain.value > (cost := giver.cost_of(stage, giver.migration_s(offer))).value:
                        yield _Offer(group, role, giver, offer, False, gain, cost)

    def _preempted(self, this: Round, giver: GroupWork, stage: Role) -> ElasticInstance | None:
        if not self._can_spare(this, giver, stage):
            return None
        return giver.least_affected(stage, [one for one in this.replaceable(giver) if one.roles == giver.roles_of(stage)])

    def _can_spare(self, this: Round, group: GroupWork, role: Role) -> bool:
        """Whether one instance less could do what has lately been asked of a stage; of decoding its batch tells."""
        if role == "decode":
            return True
        load = needed(rates_of(this.view, group.name, recent), this.view.costs)[role]
        return load <= self.shrink_to * (len(group.servers(role)) - 1)

    def _is_short(self, group: GroupWork, role: Role) -> bool:
        num = len(group.servers(role))
        if role != "decode":
            return num > 0 and group.compute_s(role, num) > self.shortage_s
        return num > 0 and not self._decodes_in_time(group, num, self.grow_at)

    def _decodes_in_time(self, group: GroupWork, num_instances: int, share: float) -> bool:
        """Whether so many instances decode within that share of the TBT target and of their KV slots."""
        decode, tbt_s = group.decode, group.costs.tbt_s
        return (not tbt_s or decode.step_s(group.costs.decode, num_instances) <= share * tbt_s) and (
            not decode.num_slots or decode.num_context_tokens <= share * decode.num_slots * num_instances
        )

    def _free(self, this: Round, group: GroupWork) -> list[ElasticInstance]:
        """Idle instances, then those that decode needs no more of, fullest last. Every stage keeps one."""
        able = [one for one in this.replaceable(group) if all(self._can_spare(this, group, role) for role in one.roles)]
        idle = [one for one in able if one.is_idle]
        num = len(group.servers("decode"))
        num_needed = next((few for few in range(1, num) if self._decodes_in_time(group, few, self.shrink_to)), num)
        decoding = [one for one in able if one.roles == {"decode"} and not one.is_idle]
        num_idle = sum("decode" in one.roles for one in idle)
        spare = sorted(decoding, key=lambda one: (-one.num_free_slots, one.instance_id))[: max(0, num - num_needed - num_idle)]
        left = Counter(role for member in group.members for role in member.roles if not member.is_starting)
        free = []
        for one in [*idle, *spare]:
            if all(left[role] > 1 for role in one.roles):
                left.subtract(one.roles)
                free.append(one)
        return free

    def _balance(self, this: Round) -> None:
        """Proactive: free instances go to the groups that a burst would hurt most. Those that are in the right group stay."""
        groups = {name: group for name, group in this.groups.items() if name != ANY}
        free = {name: self._free(this, group) for name, group in groups.items()}
        averages = {name: sum(needed(rates_of(this.view, name), this.view.costs).values()) for name in groups}
        now = {name: GroupShare(len(group.members), averages[name]) for name, group in groups.items()}
        busy = {name: GroupShare(len(groups[name].members) - len(free[name]), averages[name]) for name in groups}
        granted = grants(busy, sum(map(len, free.values())))
        gets = Counter(grant.group for grant in granted)
        after = {name: GroupShare(share.num_instances + gets[name], averages[name]) for name, share in busy.items()}
        lowest, lowest_after = (min((share.tolerance for share in each.values()), default=math.inf) for each in (now, after))
        if not granted or lowest > CALM_TOLERANCE or lowest_after < MIN_IMPROVEMENT * lowest:
            return
        leaving = [one for name in groups for one in free[name][: max(0, len(free[name]) - gets[name])]]
        coming = [name for name in groups for _ in range(gets[name] - len(free[name]))]
        terms = {f"bt_{name}": share.tolerance for name, share in now.items()}
        for one, name in list(zip(leaving, coming, strict=False))[: this.num_left]:
            role = self._busiest(this, groups[name])
            reason = f"a burst would hurt {name} most, and this {_role(one)} one is free"
            this.switch(one, name, groups[name].roles_of(role), reason, {**terms, "lowest_bt_after": lowest_after})

    def _busiest(self, this: Round, group: GroupWork) -> Role:
        loads = needed(rates_of(this.view, group.name), this.view.costs)
        return max(group.stages, key=lambda role: loads[role] / max(1, len(group.servers(role))))


def _role(instance: ElasticInstance) -> str:
    return " and ".join(sorted(instance.roles))
