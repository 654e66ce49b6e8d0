"""Which group gets idle instances: the one that a burst would hurt first (ElasticMM, arXiv 2507.10069, modality-aware load
balancing). Used by emp.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from triptych.shared.policies.groups import Group


@dataclass(frozen=True, slots=True)
class GroupShare:
    """num_instances: what a group has, so what it can use at its peak. average: how many its work fills on average."""

    num_instances: int
    average: float

    @property
    def tolerance(self) -> float:
        """bt = N_peak / N_avg; infinite when the group has nothing to do."""
        return self.num_instances / self.average if self.average > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Grant:
    """One idle instance for a group. tolerances: of all groups, just before."""

    group: Group
    tolerances: Mapping[Group, float]


def grants(shares: Mapping[Group, GroupShare], num_idle: int) -> list[Grant]:
    """Each idle instance in turn goes to the group with the lowest burst tolerance, which is computed anew after each grant, so
    that the lowest tolerance in the end is the highest that there can be. Among equals the group goes first that gains more by
    it. Nothing is granted where nobody has work."""
    shares, granted = dict(shares), []
    for _ in range(num_idle):
        tolerances = {group: share.tolerance for group, share in shares.items()}
        group = min(shares, key=lambda name: (tolerances[name], shares[name].average, name))
        if math.isinf(tolerances[group]):
            break
        granted.append(Grant(group, tolerances))
        shares[group] = replace(shares[group], num_instances=shares[group].num_instances + 1)
    return granted
