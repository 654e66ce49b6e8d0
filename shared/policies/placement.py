"""Which roles how many of some instances get, by a policy set. Pure; used by `triptych up --instances` and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.shared.errors import BadRequest
from triptych.shared.messages import Role
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT, Group

Kind = str
"""What instances with the same roles are called; the first part of their slot names."""

ROLES_OF: Mapping[Kind, tuple[Role, ...]] = {
    "encoder": ("encoder",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "text": ("prefill", "decode"),
    "prompt": ("encoder", "prefill"),
    "instance": ("encoder", "prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """shares: of each kind, in parts of all instances; more than 0, in the order in which instances are given out. The shares
    of the presets are chosen for a mix of text and pictures; step by step elasticity takes over. text_share: of the instances
    of each kind that text can use, for text requests only; None: all instances are for all requests. for_text: of one kind all
    are, and the others for everybody."""

    shares: Mapping[Kind, float]
    text_share: float | None = None
    for_text: Kind | None = None

    @property
    def min_instances(self) -> int:
        return len(self.shares)

    def counts(self, num_instances: int) -> dict[Kind, int]:
        """How many instances of each kind, at least one: the others go, one by one, to the kind that lacks most of its share.

        Raises:
            BadRequest: fewer instances than kinds.
        """
        if num_instances < self.min_instances:
            kinds = " + ".join(self.shares)
            raise BadRequest(f"{kinds} take at least {self.min_instances} instances, not {num_instances}", code="bad_setting")
        counts = dict.fromkeys(self.shares, 1)
        total = sum(self.shares.values())
        for _ in range(num_instances - self.min_instances):
            lacking = max(self.shares, key=lambda kind: num_instances * self.shares[kind] / total - counts[kind])
            counts[lacking] += 1
        return counts

    def groups(self, counts: Mapping[Kind, int]) -> dict[Kind, tuple[Group, ...]]:
        """Whose requests each instance of each kind is for. With a text_share both groups have every stage, or there are none:
        where a kind has one instance only, everybody needs it."""
        if self.for_text is not None:
            return {kind: (TEXT if kind == self.for_text else ANY,) * count for kind, count in counts.items()}
        can_part = all(count > 1 for kind, count in counts.items() if kind != "encoder")
        if self.text_share is None or not can_part:
            return {kind: (ANY,) * count for kind, count in counts.items()}
        groups = {}
        for kind, count in counts.items():
            num_text = 0 if kind == "encoder" else min(max(1, round(self.text_share * count)), count - 1)
            groups[kind] = (TEXT,) * num_text + (MULTIMODAL,) * (count - num_text)
        return groups
