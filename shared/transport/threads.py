"""Blocking calls off the event loop, each in a daemon thread of its own: for waits that a dead peer can make long.

A pool would be used up by a few such waits, and the interpreter joins a pool's threads at exit. Callers bound the number.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """A future of call(). Cancelling the future does not stop the call, only forgets its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(_retrieve)

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # call()'s result, when there is no error
        else:
            future.set_exception(error)

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:  # crosses to the loop: whoever awaits the future sees it
            failure = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, result, failure)
            except RuntimeError:  # closed in this very moment: nobody is left to tell
                return

    threading.Thread(target=run, name="transport-wait", daemon=True).start()
    return future


def _retrieve(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()  # marks it as seen: the awaiter may be gone
