"""Stands in for an engine's thread where time is only modelled: a call is made at once on the event loop, its result is given
when the time that it says it takes has passed. Hundreds of instances then need no threads. No torch.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import ParamSpec, TypeVar

from triptych.shared.engine.thread import Turn

P = ParamSpec("P")
T = TypeVar("T")

TIMER_TICK_S = 0.001  # uvloop's timers count whole milliseconds
FOLLOWS_WITHIN_S = 2 * TIMER_TICK_S  # chosen: a call asked for this soon after the last result begins where that call ended
MAX_LAG_S = 0.01  # chosen: what is made up for; tokens are gathered for longer on their way to the router


class EmulatedCalls:
    """Implements EngineCalls. The engine calls `spend` during a call, with modelled seconds.

    lag_s: how late the last result was given, in real seconds. lost_s: the sum of those that the next call did not make up for:
    what the machine could not keep up with, and what is missing to the speed that the time scale says.
    """

    def __init__(self, time_scale: float) -> None:
        self._time_scale = time_scale
        self._turn = asyncio.Lock()  # first come, first served
        self._is_hurried = asyncio.Event()
        self._spent_s = 0.0
        self._free_at_s = 0.0
        self._given_at_s = 0.0
        self.lag_s = 0.0
        self.lost_s = 0.0

    def real_s(self, modelled_s: float) -> float:
        return modelled_s / self._time_scale

    def spend(self, modelled_s: float) -> None:
        """The call under way takes that much longer. Without one: nothing, as copies that a network card makes."""
        self._spent_s += self.real_s(modelled_s)

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked_s = time.monotonic()
        self.hurry()
        async with self._turn:
            began_s = self._begin(asked_s)
            self._spent_s = 0.0
            try:
                return fn(*args, **kwargs)
            finally:
                await self._end(began_s + self._spent_s)

    async def run_in_turn(self, turn: Turn, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(fn, *args, **kwargs)

    async def run_steps(self, steps_s: Iterable[float]) -> int:
        """Calls that are known ahead, one after the other, of so many modelled seconds each. How many of them were made: at
        least one, and those begun until `hurry`, or until another call was asked for."""
        asked_s = time.monotonic()
        self._is_hurried.clear()
        async with self._turn:
            began_s = self._begin(asked_s)
            ends_s = [began_s + self.real_s(spent_s) for spent_s in accumulate(steps_s)]
            try:
                await self._hurried(ends_s[-1])
            finally:
                num_made = min(bisect_left(ends_s, time.monotonic()) + 1, len(ends_s))
                await self._end(ends_s[num_made - 1])
            return num_made

    def hurry(self) -> None:
        """Of the calls that are known ahead, make no more."""
        self._is_hurried.set()

    def close(self) -> None:
        """Nothing outlives its caller."""

    def _begin(self, asked_s: float) -> float:
        """When a call begins that has its turn now."""
        is_next = asked_s - max(self._given_at_s, self._free_at_s) < FOLLOWS_WITHIN_S
        if is_next and self.lag_s < MAX_LAG_S:
            return self._free_at_s
        self.lost_s += self.lag_s
        return time.monotonic()

    async def _hurried(self, until_s: float) -> None:
        """Returns at `hurry`, or about until_s of time.monotonic()."""
        left_s = until_s - time.monotonic()
        if left_s > TIMER_TICK_S:
            timer = asyncio.get_running_loop().call_later(left_s, self.hurry)
            try:
                await self._is_hurried.wait()
            finally:
                timer.cancel()

    async def _end(self, at_s: float) -> None:
        self._free_at_s = at_s
        await _until(at_s)
        self._given_at_s = time.monotonic()
        self.lag_s = max(self._given_at_s - at_s, 0.0)


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
