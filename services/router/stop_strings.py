"""Finds stop strings in an output that comes in pieces, and never lets a part of one out. One instance per output. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """`push` gives the text that is certain by now, `finish` the rest. is_met: the output ended before a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_met = False

    def push(self, text: str) -> str:
        """Not to be called when is_met."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_met, self._held = True, ""
            return text[: min(found)]
        end = len(text) - self._num_held(text)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """What was held back, if the output ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if stop.startswith(text[-length:])
        )
        return max(lengths, default=0)
