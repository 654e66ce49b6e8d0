"""What it gains and costs when an instance changes its stage (ElasticMM, arXiv 2507.10069, stage partition scheduling).

Lengths are tokens, times seconds. Gain and cost are seconds per token, summed over the requests that feel them. Used by emp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.shared.cost_model.api import PrefillChunk, prefill_work
from triptych.shared.cost_model.forms import PassCosts, PassWork

PUBLIC_W = 0.004  # weight of slower decoding in the authors' public code


@dataclass(frozen=True, slots=True)
class DecodeSet:
    """B_d: what the decode instances of a group have to do together. output_tokens: of one request, on average; half of them
    are still to come (chosen: nobody knows an output's end). num_slots: KV slots of one instance."""

    num_sequences: int
    num_context_tokens: int
    output_tokens: float
    num_slots: int

    def step_s(self, costs: PassCosts, num_instances: int) -> float:
        """Between two tokens of a sequence, when all are shared out evenly. What does not fit in the KV slots takes turns: a
        shortage of memory counts as a slow-down."""
        num_sequences = self.num_sequences / num_instances
        num_context_tokens = self.num_context_tokens / num_instances
        turns = max(1.0, num_context_tokens / self.num_slots) if self.num_slots else 1.0
        work = PassWork(num_sequences / turns, num_sequences / turns, 0.0, num_context_tokens / turns)
        return turns * costs.pass_s(work)

    def slowdown_s(self, costs: PassCosts, num_before: int, num_after: int) -> float:
        """L: how much later each of its outputs ends on num_after instances; negative on more of them."""
        left = self.output_tokens / 2
        return left * (self.step_s(costs, num_after) - self.step_s(costs, num_before))


def dispatch_set(lengths: Sequence[int], num_free_slots: int, tipping_tokens: float) -> int:
    """R_p: how many waiting prompts go into the next batch, first come, first served: while each has KV slots, and while the
    batch is below the tipping point, beyond which it computes no faster."""
    total = 0
    for count, length in enumerate(lengths):
        if total + length > num_free_slots or (count and total >= tipping_tokens):
            return count
        total += length
    return len(lengths)


def batches_s(lengths: Sequence[int], costs: PassCosts) -> float:
    """Seconds of all these prompts on one instance, cut into batches at the tipping point."""
    total_s, first = 0.0, 0
    while first < len(lengths):
        count = dispatch_set(lengths[first:], sum(lengths), costs.knee_tokens)
        chunks = [PrefillChunk(length) for length in lengths[first : first + count]]
        total_s += costs.pass_s(prefill_work(chunks))
        first += count
    return total_s


def gain(lengths: Sequence[int], before_s: float, after_s: float) -> float:
    """Sum over R_p of [T(R_p, E_p) - T(R_p, E_p + e_max)] / r.input_len."""
    return sum((before_s - after_s) / length for length in lengths)


def cost(output_lengths: Sequence[float], migration_s: float, slowdown_s: float, w: float) -> float:
    """Sum over B_d of [M(e_max) + w * L(B_d, E_d - e_max)] / r.output_len."""
    return sum((migration_s + w * slowdown_s) / length for length in output_lengths)
