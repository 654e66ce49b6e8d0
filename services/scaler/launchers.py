"""Where instances come from and go to: one protocol, for the launcher of `triptych up` and for orchestrators elsewhere.

Elsewhere nothing is done here: KEDA or an HPA follows the metric triptych_wanted_replicas (docs/scaling.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge

from triptych.shared.bus import Bus
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.messages import DrainRequest, InstanceId, Launched, ScaleOutRequest
from triptych.shared.policies.groups import ANY, GROUPS, Group
from triptych.shared.policies.placement import ROLES_OF, Kind

ASK_TIMEOUT_S = 5.0  # chosen: launcher and instances answer before anything has started or ended


@dataclass(frozen=True, slots=True)
class Scaling:
    """Of the instances of one kind and group: there shall be num_wanted, for which num_more start, and those in `leaving`
    finish or hand over what they have, and go for good."""

    kind: Kind
    group: Group
    num_wanted: int
    num_more: int = 0
    leaving: tuple[InstanceId, ...] = ()


class WantedReplicas:
    """The metric: how many instances of each kind and group there should be. Where it tells nothing, whoever follows it keeps
    what there is, and what an earlier scaler asked for."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        text = "instances that there should be of a kind, for a group of requests"
        self._gauge = Gauge("triptych_wanted_replicas", text, ["kind", "group"], registry=metrics)
        self._wanted: dict[tuple[Kind, Group], int] = {}
        self._told: set[tuple[Kind, Group]] = set()
        self._there: Mapping[tuple[Kind, Group], int] | None = None

    def tell(self, kind: Kind, group: Group, count: int) -> None:
        """What a policy wants."""
        self._wanted[kind, group] = count
        self._show()

    def hold_back(self, there: Mapping[tuple[Kind, Group], int] | None) -> None:
        """Of what has not been told of yet, tell only where more are wanted than are there. None: tell everything."""
        self._there = there
        self._show()

    def forget(self) -> None:
        """Tell nothing any more: another one does."""
        self._wanted, self._told = {}, set()
        self._gauge.clear()

    def _show(self) -> None:
        for key, count in self._wanted.items():
            if self._there is None or key in self._told or count > self._there.get(key, 0):
                self._told.add(key)
                self._gauge.labels(*key).set(count)


class Launcher(Protocol):
    """One of LocalLaunches and AdviseOnly."""

    async def scale(self, scaling: Scaling) -> tuple[str, ...] | None:
        """Names of the slots that were started; None where others are to follow the metric. Returns when all is under way: the
        registry shows when it has happened. What was done before an error stays done.

        Raises:
            BadRequest: there is no such kind or group.
            Overloaded: there is no room for more.
            InstanceLost, DeadlineExceeded: the launcher, or one that should leave, does not answer.
        """
        ...


class LocalLaunches:
    """By the launcher of `triptych up`. launcher_id: as its heartbeat tells."""

    def __init__(self, bus: Bus, launcher_id: InstanceId, wanted: WantedReplicas) -> None:
        self._bus = bus
        self._launcher_id = launcher_id
        self._wanted = wanted

    async def scale(self, scaling: Scaling) -> tuple[str, ...]:
        check_scaling(scaling)
        names = []
        for _ in range(scaling.num_more):
            request = ScaleOutRequest(scaling.kind, scaling.group)
            reply = await self._bus.request(self._launcher_id, request, ASK_TIMEOUT_S)
            if not isinstance(reply, Launched):
                raise InternalError(f"a launcher answered with a {type(reply).__name__}")
            names.append(reply.name)
        for instance_id in scaling.leaving:
            await self._bus.request(instance_id, DrainRequest(), ASK_TIMEOUT_S)
        self._wanted.tell(scaling.kind, scaling.group, scaling.num_wanted)
        return tuple(names)


class AdviseOnly:
    """Which instance leaves is then the orchestrator's choice; each drains when it is told to end."""

    def __init__(self, wanted: WantedReplicas) -> None:
        self._wanted = wanted

    async def scale(self, scaling: Scaling) -> None:
        check_scaling(scaling)
        self._wanted.tell(scaling.kind, scaling.group, scaling.num_wanted)


def check_scaling(scaling: Scaling) -> None:
    """Raises BadRequest when there is no such kind or group of which to start more; what leaves may have any roles."""
    if scaling.num_more and (scaling.kind not in ROLES_OF or scaling.group not in (ANY, *GROUPS)):
        raise BadRequest(f"there are no instances of kind {scaling.kind!r} for {scaling.group!r}", code="bad_setting")
