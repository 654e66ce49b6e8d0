"""One round of decisions about roles: what has been decided so far, and who may still be taken. Used by the strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.actions import Decision, Switch
from triptych.shared.policies.elastic.group_work import GroupWork
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance
from triptych.shared.policies.groups import Group


@dataclass(slots=True)
class Round:
    """groups: as they will be when all decisions are carried out. num_left: switches that the budget still has."""

    view: ClusterView
    groups: Mapping[Group, GroupWork]
    hysteresis: Hysteresis
    num_left: int
    decisions: list[Decision] = field(default_factory=list)

    def switch(
        self, instance: ElasticInstance, group: Group, roles: frozenset[Role], reason: str, terms: Mapping[str, float]
    ) -> None:
        """It leaves its group, and joins that one with these roles. It is not touched again in this round."""
        self.groups[instance.group].members.remove(instance)
        after = replace(instance, group=group, roles=roles, is_ready=False)
        self.groups[group].members.append(after)
        self.decisions.append(Decision(Switch(instance.instance_id, roles, group), reason, terms))
        self.num_left -= 1

    def movable(self, members: Sequence[ElasticInstance]) -> list[ElasticInstance]:
        """Those whose roles may change now."""
        return [one for one in members if self.hysteresis.may_switch(one, self.view.now_s)]

    def replaceable(self, group: GroupWork) -> list[ElasticInstance]:
        """Movable ones without which every stage of the group still has somebody."""
        able = self.movable(group.members)
        return [one for one in able if all(len(group.servers(role)) > 1 for role in one.roles)]

    def cover(self, group: GroupWork) -> None:
        """Stages without an instance are given to the least busy one that is there, in addition."""
        for role in group.stages:
            if not group.servers(role) and (ready := [one for one in group.members if one.is_ready]):
                least = min(ready, key=lambda one: (sum(load.num_running for load in one.loads), one.instance_id))
                reason = f"nobody else in the group {group.name or 'of all'} can be the {role}"
                self.switch(least, group.name, least.roles | group.roles_of(role), reason, {})

    def part(self, group: GroupWork) -> None:
        """Where there are enough instances for all stages, those with several roles leave to others what these do."""
        if len(group.members) >= len(group.stages):
            for one in [one for one in self.movable(group.members) if len(one.roles) > 1]:
                own = frozenset(role for role in one.roles if len(group.servers(role)) == 1)
                if own != one.roles and own and self.num_left > 0:
                    self.switch(one, group.name, own, "others have its other roles", {})
