"""A semaphore of amounts: how many bytes or tokens may be in hand at once, given out in an order. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Budget(Generic[T]):
    """At most `capacity` units are held at once. Whoever is first in the order is not overtaken by those who want less, so that
    large amounts starve only where the order lets them. An amount over the capacity waits until it is alone.

    Who holds something may want more (`add`). That goes before those who hold nothing, and where there is no room for it one
    holder at a time gets more than there is: else holders would wait for each other.

    Args:
        capacity: units, more than 0.
        order: of those who wait; they are given in the order in which they came, which is the default.
    """

    def __init__(self, capacity: int, order: Callable[[Sequence[T]], Sequence[T]] = lambda waiting: waiting) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._order = order
        self._held: dict[T, int] = {}
        self._over: T | None = None
        self._adding: dict[asyncio.Future[None], tuple[T, int]] = {}
        self._waiting: dict[T, tuple[int, asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, amount: int, holder: T) -> AsyncIterator[None]:
        """Hold `amount` units inside the block, waiting for them first; nothing waits for nothing. The caller bounds the
        wait. holder: who wants them, once at a time."""
        amount = min(amount, self.capacity)
        if amount > 0:
            await self._acquire(amount, holder)
        self._held[holder] = amount
        try:
            yield
        finally:
            self.num_held -= self._held.pop(holder)
            if self._over is holder:
                self._over = None
            self._give()

    async def add(self, amount: int, holder: T) -> None:
        """As much more for one that is inside its `hold`, waiting for it; it goes back with the rest."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adding[future] = holder, amount
        self._give()
        try:
            await future
        finally:
            if self._adding.pop(future, None) is not None:
                self._give()

    async def _acquire(self, amount: int, holder: T) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[holder] = amount, future
        self._give()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # given and cancelled in the same turn of the loop
                self.num_held -= amount
            self._waiting.pop(holder, None)
            self._give()
            raise

    def _give(self) -> None:
        if not self._give_more() or not self._waiting or self.num_held >= self.capacity:
            return
        for holder in self._order(list(self._waiting)):
            amount, future = self._waiting[holder]
            if not future.done():  # else it was cancelled
                if self.num_held + amount > self.capacity:
                    return
                self.num_held += amount
                future.set_result(None)
            del self._waiting[holder]

    def _give_more(self) -> bool:
        """Whether all have it who want more of those who hold."""
        wanting = {future: wanted for future, wanted in self._adding.items() if wanted[0] in self._held}
        for holder in self._order(list(dict.fromkeys(holder for holder, _ in wanting.values()))):
            for future, (wants, amount) in wanting.items():
                if wants is holder and self._has_room(amount, holder) and not future.done():
                    self.num_held += amount
                    self._held[holder] += amount
                    del self._adding[future]
                    future.set_result(None)
        return not any(future in self._adding for future in wanting)

    def _has_room(self, num_more: int, holder: T) -> bool:
        if self.num_held + num_more <= self.capacity:
            return True
        self._over = self._over or holder
        return self._over is holder
