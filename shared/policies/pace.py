"""How fast the candidates of a stage compute, to turn tokens into seconds. Pure; used by routing and admission."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.shared.policies.views import StageView

FIRST_TOKENS_PER_S = 1000.0  # chosen: before anybody has computed anything; a small model's prefill on one core
NOISE_FACTOR = 2.0  # chosen: instances of one kind differ by the mix of their work; beyond that one is really slow, or fast


@dataclass(frozen=True, slots=True)
class Pace:
    """tokens_per_s: the median of the candidates that have computed."""

    tokens_per_s: float

    @classmethod
    def of(cls, candidates: Sequence[StageView]) -> Pace:
        measured = [view.tokens_per_s for view in candidates if view.tokens_per_s > 0]
        return cls(statistics.median(measured) if measured else FIRST_TOKENS_PER_S)

    def at(self, view: StageView) -> float:
        """Tokens per second of one candidate: the common pace, so that idle instances are equals whatever they did last, but
        its own when it is further from it than mixes of work explain."""
        own, common = view.tokens_per_s, self.tokens_per_s
        return own if own and not common / NOISE_FACTOR <= own <= common * NOISE_FACTOR else common

    def wait_s(self, view: StageView) -> float:
        """Until the candidate has computed all that it has."""
        return view.other_s + view.num_pending_tokens / self.at(view)

    def finish_s(self, view: StageView, num_tokens: int) -> float:
        """Until num_tokens more are computed there as well."""
        return view.other_s + (view.num_pending_tokens + num_tokens) / self.at(view)
