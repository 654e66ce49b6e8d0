"""The cluster as elastic policies see it, kept up to date from heartbeats: instances, demand, and what was started or is being
switched but does not show yet. Pure: beats and times are given. Times are on the policy's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from triptych.shared.decision_entry import Look
from triptych.shared.instance_info import Demand, StageLoad
from triptych.shared.messages import Heartbeat, InstanceId, Role
from triptych.shared.policies.elastic.demand_meter import DemandMeter
from triptych.shared.policies.elastic.views import ElasticInstance, GroupDemand
from triptych.shared.policies.groups import GROUPS, Group
from triptych.shared.policies.placement import ROLES_OF, Kind

ALL_ROLES: frozenset[Role] = frozenset(ROLES_OF["instance"])
_KIND_OF = {frozenset(roles): kind for kind, roles in ROLES_OF.items()}


def kind_of(roles: Iterable[Role]) -> Kind:
    """What instances with these roles are called."""
    return _KIND_OF.get(frozenset(roles)) or "+".join(sorted(roles))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Roles and group of an instance, and since when it has had them."""

    roles: frozenset[Role]
    group: Group
    since_s: float


@dataclass(frozen=True, slots=True)
class _Expected:
    """An instance that was asked to come or to go. until_s: when that counts as failed."""

    instance: ElasticInstance
    until_s: float


@dataclass(slots=True)
class ClusterState:
    """`observe` often, then ask. meter: of demand. block_size: tokens per KV block. time_scale: seconds of the policy's clock
    in a real one."""

    meter: DemandMeter
    block_size: int
    time_scale: float = 1.0
    instances: tuple[ElasticInstance, ...] = ()
    is_complete: bool = False  # all instances were ready once, and all roles were there
    _seen: dict[InstanceId, _Seen] = field(default_factory=dict)
    _ending: dict[InstanceId, _Seen] = field(default_factory=dict)  # not ready any more, and not gone
    _names: frozenset[str] = frozenset()
    _counts: dict[InstanceId, Mapping[Group, Demand]] = field(default_factory=dict)
    _coming: dict[str, _Expected] = field(default_factory=dict)
    _leaving: dict[str, _Expected] = field(default_factory=dict)
    _switching: dict[InstanceId, ElasticInstance] = field(default_factory=dict)

    def observe(self, beats: Iterable[Heartbeat], now_s: float) -> None:
        """The last heartbeat of everybody."""
        beats = list(beats)
        self._count_demand([beat for beat in beats if beat.service == "router"], now_s)
        ours = [beat for beat in beats if beat.service == "instance"]
        ready = [beat for beat in ours if beat.state == "ready" and beat.roles]
        seen = {beat.instance_id: self._see(beat, now_s) for beat in ready}
        for beat in ready:
            if beat.instance_id not in self._seen:
                _meet(self._coming, beat.name, seen[beat.instance_id])
        for instance_id in self._seen.keys() - seen.keys():
            _meet(self._leaving, instance_id, self._seen[instance_id])
        known = self._ending | self._seen
        self._ending = {id_: known[id_] for beat in ours if (id_ := beat.instance_id) in known.keys() - seen.keys()}
        self._seen, self._names = seen, frozenset(beat.name for beat in ready)
        self._coming, self._leaving = _still(self._coming, now_s), _still(self._leaving, now_s)
        staying = [beat for beat in ready if beat.instance_id not in self._leaving]
        there = [self._switching.get(beat.instance_id) or self._instance(beat) for beat in staying]
        self.instances = (*there, *(one.instance for one in self._coming.values()))
        if not self.is_complete:
            roles = {role for beat in ready for role in beat.roles}
            self.is_complete = roles >= ALL_ROLES and not any(beat.state == "starting" for beat in ours)

    def begin_switch(self, instance_id: InstanceId, roles: frozenset[Role], group: Group) -> None:
        """From now on it counts as what it will be, until end_switch."""
        now = self.find(instance_id)
        if now is not None:
            self._switching[instance_id] = replace(now, roles=roles, group=group, is_ready=False)

    def end_switch(self, instance_id: InstanceId) -> None:
        self._switching.pop(instance_id, None)

    def expect(self, name: str, kind: Kind, group: Group, now_s: float, patience_s: float) -> None:
        """An instance was asked for: it counts until it is ready, or for patience_s. name: of its slot, where that is known."""
        if name in self._names:
            return  # it was quick
        roles = frozenset(ROLES_OF[kind])
        instance = ElasticInstance(InstanceId(name), roles, group, since_s=now_s, is_ready=False, is_starting=True)
        self._coming[name] = _Expected(instance, now_s + patience_s)

    def dismiss(self, instance: ElasticInstance, now_s: float, patience_s: float) -> None:
        """It was asked to leave: it does not count any more, unless it, or one like it, is still there after patience_s."""
        self._leaving[instance.instance_id] = _Expected(instance, now_s + patience_s)

    def find(self, instance_id: InstanceId) -> ElasticInstance | None:
        """One that is there and stays."""
        return next((one for one in self.instances if one.instance_id == instance_id), None)

    def has(self, instance_id: InstanceId, roles: frozenset[Role], group: Group) -> bool:
        """Whether it was seen with these."""
        seen = self._seen.get(instance_id)
        return seen is not None and (seen.roles, seen.group) == (roles, group)

    def alone_in(self, instance_id: InstanceId, keeps: frozenset[Role] = frozenset()) -> frozenset[Role]:
        """Roles that nobody would have any more if it kept only these."""
        others = {role for one in self.instances if one.is_ready and one.instance_id != instance_id for role in one.roles}
        seen = self._seen.get(instance_id)
        return seen.roles - keeps - others if seen is not None else frozenset()

    def counts(self) -> Counter[tuple[Kind, Group]]:
        """Instances by kind and group, those that start included."""
        return Counter((kind_of(one.roles), one.group) for one in self.instances)

    def paid(self) -> Counter[Kind]:
        """Instances by kind that use a machine: those that start, and those that leave until they are gone, included."""
        leaving = [*self._ending.values(), *(seen for id_, seen in self._seen.items() if id_ in self._leaving)]
        roles = [*(one.roles for one in self.instances), *(seen.roles for seen in leaving)]
        return Counter(map(kind_of, roles))

    def demand(self) -> dict[Group, GroupDemand]:
        return self.meter.demand()

    def look(self) -> Look:
        """In short, for the log."""
        waiting, running = Counter[str](), Counter[str]()
        for load in (load for one in self.instances for load in one.loads):
            waiting[load.stage] += load.num_waiting
            running[load.stage] += load.num_running
        num_slots = sum(one.num_slots for one in self.instances)
        demand = self.demand()
        pictures = [one.recent.images_per_request for one in demand.values() if one.recent.images]
        return Look(
            instances={f"{kind} {group}".strip(): count for (kind, group), count in sorted(self.counts().items())},
            num_waiting=dict(waiting),
            num_running=dict(running),
            free_kv=round(sum(one.num_free_slots for one in self.instances) / num_slots, 4) if num_slots else 1.0,
            requests_per_s={name: round(one.recent.requests, 4) for name, one in demand.items()},
            images_per_request=round(max(pictures, default=0.0), 3),
            attainment={name: round(one.attainment, 4) for name, one in demand.items() if one.attainment is not None},
        )

    def _see(self, beat: Heartbeat, now_s: float) -> _Seen:
        roles, seen = frozenset(beat.roles), self._seen.get(beat.instance_id)
        return seen if seen is not None and self.has(beat.instance_id, roles, beat.group) else _Seen(roles, beat.group, now_s)

    def _instance(self, beat: Heartbeat) -> ElasticInstance:
        held, seen = beat.resources, self._seen[beat.instance_id]
        return ElasticInstance(
            beat.instance_id,
            seen.roles,
            seen.group,
            tuple(self._load(load) for load in beat.loads),
            held.num_blocks * self.block_size,
            (held.num_free_blocks + held.num_cached_blocks) * self.block_size,
            seen.since_s,
        )

    def _load(self, load: StageLoad) -> StageLoad:
        return msgspec.structs.replace(load, tokens_per_s=load.tokens_per_s / self.time_scale)

    def _count_demand(self, routers: Iterable[Heartbeat], now_s: float) -> None:
        """A router that is heard for the first time has counted before."""
        news = dict.fromkeys(GROUPS, Demand())
        for beat in routers:
            before = self._counts.get(beat.instance_id, beat.demand)
            for group in news.keys() & beat.demand.keys():
                news[group] = _sum(news[group], beat.demand[group], before.get(group, Demand()))
        self._counts = {beat.instance_id: beat.demand for beat in routers}
        self.meter = self.meter.add(now_s, news)


def _sum(total: Demand, now: Demand, before: Demand) -> Demand:
    """total, and what came between two counts."""
    names = Demand.__struct_fields__
    return Demand(**{name: getattr(total, name) + getattr(now, name) - getattr(before, name) for name in names})


def _meet(expected: dict[str, _Expected], name: str, seen: _Seen) -> None:
    """It came, or went: who was expected under that name; or one like it, as orchestrators have names and choices of their
    own."""
    like = (key for key, one in expected.items() if (one.instance.roles, one.instance.group) == (seen.roles, seen.group))
    expected.pop(name if name in expected else next(like, ""), None)


def _still(expected: Mapping[str, _Expected], now_s: float) -> dict[str, _Expected]:
    return {name: one for name, one in expected.items() if one.until_s > now_s}
