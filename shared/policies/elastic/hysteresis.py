"""How often roles may change: every instance keeps its roles for a while, and all together change few times in a while.

Both papers leave it open; ours, since roles that flip at once with the load cost more than they gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ElasticInstance


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """dwell_s: that an instance keeps its roles. max_switches: of all instances together, in window_s. At least one."""

    dwell_s: float
    max_switches: int
    window_s: float

    def num_left(self, memory: Memory, now_s: float) -> int:
        """Switches that the budget still has."""
        return max(0, self.max_switches - len(self._recent(memory, now_s)))

    def may_switch(self, instance: ElasticInstance, now_s: float) -> bool:
        """Whether it is ready, and has had its roles for long enough."""
        return instance.is_ready and now_s - instance.since_s >= self.dwell_s

    def spend(self, memory: Memory, now_s: float, num_switches: int) -> Memory:
        """What to remember after so many switches."""
        return replace(memory, switched_at_s=(*self._recent(memory, now_s), *[now_s] * num_switches))

    def _recent(self, memory: Memory, now_s: float) -> tuple[float, ...]:
        return tuple(at_s for at_s in memory.switched_at_s if now_s - at_s < self.window_s)
