"""Conversations: a turn waits for the end of the one before, and repeats all that was said."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence

from triptych.loadgen.replay.words import Piece

MAX_SESSIONS = 10_000  # chosen: kept at once; whose history is forgotten goes on as a request of its own, of the same length


class History:
    """What was said so far, as messages of JSON with commas after them. Whoever sends a turn holds the lock, which is given in
    the order in which turns ask for it."""

    __slots__ = ("ended_s", "lock", "num_tokens", "pieces")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.pieces: list[Piece] = []
        self.num_tokens = 0
        self.ended_s = 0.0

    def forget(self) -> None:
        """What was said, not when."""
        self.pieces.clear()
        self.num_tokens = 0

    def add(self, message: Sequence[Piece], answer: str, num_tokens: int) -> None:
        """A turn that was answered. num_tokens: of the whole conversation by now."""
        said = json.dumps(answer).encode()
        self.pieces += [*message, b',{"role":"assistant","content":', said, b"},"]
        self.num_tokens = num_tokens


class Sessions:
    """Histories by name, the most recently used ones."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, History] = OrderedDict()

    def of(self, session: str | None) -> History:
        """A new one for a new session, and for each request that belongs to none."""
        if session is None:
            return History()
        history = self._histories.setdefault(session, History())
        self._histories.move_to_end(session)
        if len(self._histories) > MAX_SESSIONS:
            self._histories.popitem(last=False)
        return history
