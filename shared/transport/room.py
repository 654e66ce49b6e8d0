"""Waiting for room in a store's memory: first come, first served, a bounded number of waiters, a bounded time. Never grows."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from triptych.shared.errors import Overloaded
from triptych.shared.transport.memory import STAMP_BYTES, TensorMemory

MAX_WAITERS = 256  # chosen: several times the requests that one instance works on at once


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    num_bytes: int
    granted: asyncio.Future[int]


class Room:
    """Hands out ranges of a memory. A large waiter at the head holds back smaller ones: none starves."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self._waiters: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def take(self, num_bytes: int, wait_s: float) -> int:
        """Offset of num_bytes, to be given back.

        Raises:
            Overloaded: no room within wait_s, too many waiters, or larger than the whole arena.
        """
        if num_bytes + STAMP_BYTES > self._memory.allocator.capacity_bytes:
            raise Overloaded("a tensor is larger than the whole tensor store", code="tensor_too_large", retry_after_s=None)
        offset = self.take_now(num_bytes)
        if offset is not None:
            return offset
        if len(self._waiters) >= MAX_WAITERS or wait_s <= 0:
            raise _full()
        waiter = _Waiter(num_bytes, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.granted
        except BaseException as error:
            self._withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise _full() from None
            raise

    def take_now(self, num_bytes: int) -> int | None:
        """Offset of num_bytes, to be given back, or None when there is no room or others wait for it."""
        return None if self._waiters else self._memory.allocate(num_bytes)

    def give_back(self, offset: int) -> None:
        """Free a range and serve the waiters that now fit."""
        self._memory.free(offset)
        self._serve()

    def close(self) -> None:
        """Refuse everyone who waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(_full())

    def _serve(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.granted.done():
                offset = self._memory.allocate(waiter.num_bytes)
                if offset is None:
                    return
                waiter.granted.set_result(offset)
            self._waiters.popleft()

    def _withdraw(self, waiter: _Waiter) -> None:
        """The waiter gave up: maybe in the same moment as it was served."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._serve()
        elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            self.give_back(waiter.granted.result())


def _full() -> Overloaded:
    return Overloaded("the tensor store is full; try again later", code="tensor_store_full")
