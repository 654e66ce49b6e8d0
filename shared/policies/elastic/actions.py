"""What elastic policies decide: actions, each in a decision with its reason and its terms. Carried out by the scaler.

An action may fail or come late: nothing is assumed about it, the next view tells what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.groups import ANY, Group
from triptych.shared.policies.placement import Kind


@dataclass(frozen=True, slots=True)
class Switch:
    """The instance gets exactly these roles, and this group. What runs in a role that it loses is finished or handed over."""

    instance_id: InstanceId
    roles: frozenset[Role]
    group: Group = ANY


@dataclass(frozen=True, slots=True)
class Launch:
    """count more instances of a kind (placement.py)."""

    kind: Kind
    group: Group = ANY
    count: int = 1


@dataclass(frozen=True, slots=True)
class Drain:
    """The instance finishes or hands over what it has, and leaves."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many instances of a kind and group there should be."""

    kind: Kind
    group: Group
    count: int


@dataclass(frozen=True, slots=True)
class Advise:
    """How many there are to be when all is done, told when it changes: for whoever scales instances elsewhere (KEDA, HPA)."""

    wanted: tuple[Wanted, ...]


Action = Switch | Launch | Drain | Advise


@dataclass(frozen=True, slots=True)
class Decision:
    """reason: in words, for people. terms: the figures that it was made by, such as gain, cost, w, bt_text, M_L, M_C."""

    action: Action
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)
