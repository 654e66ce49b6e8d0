"""The one thread that an engine runs on, so that model work never blocks the event loop and never runs twice at once."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from triptych.shared.engine.shared_cores import Cores, OwnCores, Rank

POLL_S = 0.005  # chosen: of asking whether others still compute, which takes some microseconds
LINGER_S = 0.01  # chosen: longer than the event loop takes from one step to the next, in which an engine computes on
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """Of a call, on a machine whose cores engines share. for_long_s, for_brief_s: others who compute first tokens go first, for
    so long at most, where these take long and where they do not."""

    rank: Rank
    for_long_s: float = 0.0
    for_brief_s: float = 0.0

    def gives_way(self, cores: Cores, waited_s: float) -> bool:
        return (waited_s < self.for_long_s and cores.others_compute(Rank.LONG)) or (
            waited_s < self.for_brief_s and cores.others_compute(Rank.BRIEF)
        )


ANY_TURN = Turn(Rank.LAST)  # nobody waits for it


class EngineCalls(Protocol):
    """Calls of one engine: one after the other, in the order they were asked for."""

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args), off the event loop's time. When the caller is cancelled, a call that already runs is waited for before
        CancelledError goes on: whatever it touches may be freed only then."""
        ...

    async def run_in_turn(self, turn: Turn, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, but for when it is its turn."""
        ...

    def close(self) -> None:
        """Drop what has not begun and wait for what runs."""
        ...


class EngineThread:
    """Implements EngineCalls, on a thread of its own. cores: what the calls compute with."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.cores: Cores = OwnCores()
        self._num_calls = 0
        self._leaving: asyncio.TimerHandle | None = None

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run_in_turn(ANY_TURN, fn, *args, **kwargs)

    async def run_in_turn(self, turn: Turn, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        began_s = time.monotonic()
        while turn.gives_way(self.cores, time.monotonic() - began_s):
            if not self._num_calls:
                self.cores.leave()
            await asyncio.sleep(POLL_S)
        return await self._counted(turn.rank, functools.partial(fn, *args, **kwargs))

    async def _counted(self, rank: Rank, call: Callable[[], T]) -> T:
        self._num_calls += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        try:
            return await self._called(rank, call)
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._leaving = asyncio.get_running_loop().call_later(LINGER_S, self.cores.leave)

    async def _called(self, rank: Rank, call: Callable[[], T]) -> T:
        def call_with_cores() -> T:
            self.cores.take(rank)
            try:
                return call()
            finally:
                self.cores.rest()

        submitted = self._executor.submit(call_with_cores)
        future = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await _ended(future)
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _ended(future: asyncio.Future[T]) -> None:
    while not future.done():
        try:
            await asyncio.wait([future])  # no timeout: a forward pass ends
        except asyncio.CancelledError:
            continue  # the caller raises the first one
    if not future.cancelled():
        future.exception()  # seen: nobody else will look
