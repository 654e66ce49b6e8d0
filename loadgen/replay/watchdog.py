"""Tells a target that has died from one that refuses: after some failed connections it is asked for its models, for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from triptych.loadgen.replay.outcome import RequestOutcome

SUSPECT_AFTER = 5  # failed connections in a row; chosen
DEAD_AFTER_S = 10.0  # chosen: longer than a router takes to start again
PROBE_EVERY_S = 0.5  # chosen


class Watchdog:
    """Sees every outcome; sets `stop` when the target is dead.

    Args:
        is_there: asks the target something cheap; takes seconds at most.
    """

    def __init__(
        self, is_there: Callable[[], Awaitable[bool]], stop: asyncio.Event, dead_after_s: float = DEAD_AFTER_S
    ) -> None:
        self._is_there = is_there
        self._stop = stop
        self._dead_after_s = dead_after_s
        self._num_failed = 0
        self._suspects = asyncio.Event()
        self.is_dead = False

    def see(self, outcome: RequestOutcome) -> None:
        """What breaks in the middle or takes too long says nothing either way."""
        if outcome.error == "connection":
            self._num_failed += 1
            if self._num_failed >= SUSPECT_AFTER:
                self._suspects.set()
        elif outcome.error is None or outcome.error.startswith("http_"):
            self._num_failed = 0
            self._suspects.clear()

    async def watch(self) -> None:
        """Until the target is dead, or for ever."""
        while not self.is_dead:
            await self._suspects.wait()
            since_s = time.monotonic()
            while self._suspects.is_set() and not self.is_dead:
                if await self._is_there():
                    self._num_failed = 0
                    self._suspects.clear()
                elif time.monotonic() - since_s >= self._dead_after_s:
                    self.is_dead = True
                else:
                    await asyncio.sleep(PROBE_EVERY_S)
        self._stop.set()

    async def look_once(self) -> None:
        """At the end of a replay too short for `watch` to be sure."""
        if self._suspects.is_set() and not self.is_dead:
            self.is_dead = not await self._is_there()
