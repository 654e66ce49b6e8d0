"""How fast a role computes while it does: the tokens per second of a heartbeat."""

from __future__ import annotations

MEMORY_S = 10.0  # chosen: of computing; what lies further back counts less than a third


class Rate:
    """Both sums fade with the time that is computed, not with time that passes: an idle role forgets nothing."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._spent_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 before anything was computed."""
        return self._num_tokens / self._spent_s if self._spent_s > 0 else 0.0

    def time_s(self, num_tokens: int) -> float:
        """What so many tokens take; 0 before anything was computed."""
        tokens_per_s = self.tokens_per_s
        return num_tokens / tokens_per_s if tokens_per_s else 0.0

    def note(self, num_tokens: int, spent_s: float) -> None:
        """A step computed so many tokens."""
        kept = max(1.0 - spent_s / MEMORY_S, 0.0)
        self._num_tokens = kept * self._num_tokens + num_tokens
        self._spent_s = kept * self._spent_s + spent_s
