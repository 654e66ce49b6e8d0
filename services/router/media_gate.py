"""How many requests with pictures may be under way at once between their first picture and their first token. Loop only.

A request needs the embeddings of all its pictures at once, and gets room for them one by one. When many requests share a
store that is too small for all, each holds a part and waits for the rest, for ever. How much fits depends on sizes that
nobody knows before, so the number is found as TCP finds its window: open until a store was full for too long, then halved,
then slowly widened again. A request whose attempt ended that way has let go of what it held, and comes again in its turn.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from triptych.shared.errors import DeadlineExceeded, InstanceLost

STORE_FULL = "store_full"  # code of the InstanceLost that ends an attempt because a stage had no room for its tensors


class MediaGate:
    """Those who arrived first go first."""

    def __init__(self) -> None:
        self._width = math.inf
        self._num_inside = 0
        self._turns = itertools.count(1)
        self._last_turn = 0
        self._shrunk_at_turn = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap

    def __len__(self) -> int:
        """Requests inside and waiting."""
        return self._num_inside + len(self._waiting)

    @property
    def width(self) -> float:
        return self._width

    @asynccontextmanager
    async def turn(self, arrived_at_s: float, timeout_s: float) -> AsyncIterator[None]:
        """The block runs when it is its request's turn.

        Raises:
            DeadlineExceeded: that took longer than timeout_s.
        """
        turn = next(self._turns)
        await self._enter(arrived_at_s, turn, timeout_s)
        turn = self._last_turn = next(self._turns)
        try:
            yield
        except InstanceLost as error:
            if error.code == STORE_FULL:
                self._shrink(turn)
            raise
        else:
            self._width += 1 / self._width**2
        finally:
            self._leave()

    async def _enter(self, arrived_at_s: float, number: int, timeout_s: float) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (arrived_at_s, number, granted))
        self._admit()
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._leave()  # granted and given up in the same turn of the loop
            else:
                self._waiting = [one for one in self._waiting if one[2] is not granted]
                heapq.heapify(self._waiting)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded() from None
            raise

    def _leave(self) -> None:
        self._num_inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_inside + 1 <= self._width:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                self._num_inside += 1
                granted.set_result(None)

    def _shrink(self, turn: int) -> None:
        """Once for all who were let in before the last time: they got in each other's way in one and the same crowd."""
        if turn > self._shrunk_at_turn:
            self._width = max(1.0, self._num_inside / 2)
            self._shrunk_at_turn = self._last_turn
