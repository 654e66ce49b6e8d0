"""outcomes.jsonl while a replay writes it: a disk that is full ends the replay, and not in the middle of a request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from triptych.loadgen.replay.conditions import OUTCOMES_FILE
from triptych.loadgen.replay.outcome import RequestOutcome


class OutcomesWriter:
    """A line for each outcome. failure: why no more can be written; then `stop` is set."""

    def __init__(self, folder: Path, stop: asyncio.Event) -> None:
        self._file = (folder / OUTCOMES_FILE).open("wb")
        self._stop = stop
        self.failure = ""

    def write(self, outcome: RequestOutcome) -> None:
        try:
            self._file.write(msgspec.json.encode(outcome) + b"\n")
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """What was shown is kept, whatever comes."""
        try:
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = self.failure or str(error)
        self._stop.set()
