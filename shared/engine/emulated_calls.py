"""Stands in for an engine's thread where time is only modelled: a call is made at once on the event loop, its result is given
when the time that it says it takes has passed. Hundreds of instances then need no threads. No torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TIMER_TICK_S = 0.001  # uvloop's timers count whole milliseconds
FOLLOWS_WITHIN_S = 2 * TIMER_TICK_S  # chosen: a call this soon after the last one begins where that ended


class EmulatedCalls:
    """Implements EngineCalls. The engine calls `spend` during a call, with modelled seconds.

    lag_s: how late the last result was given, in real seconds. lost_s: the sum of those after which the next call did not
    begin in time: what the machine could not keep up with, and what is missing to the speed that the time scale says.
    """

    def __init__(self, time_scale: float) -> None:
        self._time_scale = time_scale
        self._turn = asyncio.Lock()  # first come, first served
        self._spent_s = 0.0
        self._free_at_s = 0.0
        self.lag_s = 0.0
        self.lost_s = 0.0

    def spend(self, modelled_s: float) -> None:
        """The call under way takes that much longer. Without one: nothing, as copies that a network card makes."""
        self._spent_s += modelled_s / self._time_scale

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._turn:
            began_s = time.monotonic()
            if began_s - self._free_at_s < FOLLOWS_WITHIN_S:
                began_s = self._free_at_s
            else:
                self.lost_s += self.lag_s
            self._spent_s = 0.0
            try:
                return fn(*args, **kwargs)
            finally:
                self._free_at_s = began_s + self._spent_s
                await _until(self._free_at_s)
                self.lag_s = max(time.monotonic() - self._free_at_s, 0.0)

    def close(self) -> None:
        """Nothing outlives its caller."""


async def _until(at_s: float) -> None:
    """Sleep until at_s of time.monotonic(), less a tick; also when cancelled meanwhile, which is raised at the end. Others get
    a turn also where at_s is over: calls that are shorter than the loop needs for one would have it for themselves."""
    cancelled: asyncio.CancelledError | None = None
    is_due = False
    while not is_due:
        left_s = at_s - time.monotonic()
        is_due = left_s <= TIMER_TICK_S
        try:
            await asyncio.sleep(0 if is_due else left_s)
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    if cancelled is not None:
        raise cancelled
