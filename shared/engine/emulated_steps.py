"""Decode steps of an emulated engine that are known ahead: many are one call, whose tokens come when the last one is over. Used
by the decode role of emulated instances; what is modelled is as if each step were a call. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from triptych.shared.engine.api import Sequence
from triptych.shared.engine.emulated import EmulatedEngine
from triptych.shared.engine.emulated_calls import EmulatedCalls


class EmulatedSteps:
    """gather_s: real seconds within which the steps of one call begin: as long as tokens may be gathered."""

    def __init__(self, engine: EmulatedEngine, calls: EmulatedCalls, gather_s: float) -> None:
        self._engine = engine
        self._calls = calls
        self._gather_s = gather_s

    def num_within(self, sequences: Seq[Sequence]) -> int:
        """How many steps are one call at most."""
        return 1 + int(self._gather_s / self._calls.real_s(self._engine.decode_s(sequences)))

    async def run(self, sequences: Seq[Sequence], most: int) -> list[list[int]]:
        """The next tokens of each, as many of one as of the other: `most`, or fewer where one of them ends an output, or after
        `hurry`. Each sequence lacks the KV of its last token only, and has blocks for all. As Engine.run, it appends none."""
        outputs, steps_s = self._engine.foresee(sequences, most)
        num_made = await self._calls.run_steps(steps_s)
        for sequence in sequences:
            self._engine.advance(sequence, num_made)
        return [output[:num_made] for output in outputs]

    def hurry(self) -> None:
        """Something is to happen between two steps: the one under way is the last."""
        self._calls.hurry()
