"""The protocol of elastic strategies, and the one that does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from triptych.shared.policies.elastic.actions import Decision, Wanted
from triptych.shared.policies.elastic.views import ClusterView

History = tuple[tuple[float, tuple[Wanted, ...]], ...]
"""What was wanted, and when last."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a strategy remembers from one decision to the next; callers only hand it on, and begin with NOTHING.

    switched_at_s: recent switches. planned_at_s: when all was last planned. advised: what was last told. wanted: of late.
    """

    switched_at_s: tuple[float, ...] = ()
    planned_at_s: float | None = None
    advised: tuple[Wanted, ...] = ()
    wanted: History = ()


NOTHING = Memory()


class Elasticity(Protocol):
    """One strategy with its settings; frozen, so that the scaler and simulators share it. period_s: how often it wants to be
    asked, in seconds of the view's clock. scales: whether it also has instances started and drained, where it may."""

    scales: ClassVar[bool]

    @property
    def period_s(self) -> float: ...

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        """What to do now, in the order in which to do it: at most one action for an instance. Equal views and memories give
        equal decisions."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Instances keep the roles that they started with."""

    scales: ClassVar[bool] = False
    period_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        return [], memory
