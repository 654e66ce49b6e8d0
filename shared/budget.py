"""A semaphore of amounts: how many bytes or tokens may be in hand at once, given out in order of asking. Event loop only."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """At most `capacity` units are held at once. First come, first served: a large amount is not overtaken by small ones,
    so it can't starve. An amount over the capacity waits until it is alone.

    Args:
        capacity: units, more than 0.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[None]:
        """Hold `amount` units inside the block, waiting for them first; nothing waits for nothing. The caller bounds the
        wait."""
        amount = min(amount, self.capacity)
        if amount > 0:
            await self._acquire(amount)
        try:
            yield
        finally:
            self.num_held -= amount
            self._give()

    async def _acquire(self, amount: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, future))
        self._give()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # given and cancelled in the same turn of the loop
                self.num_held -= amount
            self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            amount, future = self._waiting[0]
            if not future.done():
                if self.num_held + amount > self.capacity:
                    return
                self.num_held += amount
                future.set_result(None)
            self._waiting.popleft()
