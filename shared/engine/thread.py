"""The one thread that an engine runs on, so that model work never blocks the event loop and never runs twice at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class EngineCalls(Protocol):
    """Calls of one engine: one after the other, in the order they were asked for."""

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args), off the event loop's time. When the caller is cancelled, a call that already runs is waited for before
        CancelledError goes on: whatever it touches may be freed only then."""
        ...

    def close(self) -> None:
        """Drop what has not begun and wait for what runs."""
        ...


class EngineThread:
    """Implements EngineCalls, on a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = self._executor.submit(fn, *args, **kwargs)
        future = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not call.cancel():
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
