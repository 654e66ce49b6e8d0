"""Which handler tasks run for which request, so that a release or a lost router can end them. Used by every stage.

A release can overtake its request (the bus and HTTP uploads are separate ways in), so released ids stay refused for a
bounded while. A router that does a request over after releasing it must therefore use a new request id. In the same way a
request can come after the end of its router, who would never release it: it is refused as well.
Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.shared.errors import InstanceLost
from triptych.shared.messages import InstanceId, RequestId

RELEASED_MEMORY_S = 60.0  # chosen: longer than a message can be under way, shorter than ids could ever matter
MAX_REMEMBERED = 16_384  # chosen: ids remembered, a few MB at most


@dataclass(slots=True, eq=False)
class _Running:
    request_id: RequestId
    task: asyncio.Task[object]
    num_cancelling_before: int
    is_released: bool = False

    def cancel(self) -> None:
        if not self.is_released:
            self.is_released = True
            self.task.cancel("released")


class RequestTasks:
    """Running handler tasks by request, whose router each request is, and the ids released of late.

    Args:
        released_memory_s: how long a released id stays refused.
        max_remembered: released ids, and requests with their routers, that are kept; the oldest are forgotten (what a
            forgotten request still holds then ends with its lease).
        clock: seconds, monotonic; given in tests.

    has_ended: whether a router is gone for good; set to that of the registry by the service when it starts.
    """

    def __init__(
        self,
        released_memory_s: float = RELEASED_MEMORY_S,
        max_remembered: int = MAX_REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._released_memory_s = released_memory_s
        self._max_remembered = max_remembered
        self._clock = clock
        self._running: dict[RequestId, list[_Running]] = {}
        self._released_at: OrderedDict[RequestId, float] = OrderedDict()
        self._router_of: OrderedDict[RequestId, InstanceId] = OrderedDict()
        self._num_running = 0
        self.has_ended: Callable[[InstanceId], bool] = lambda router_id: False

    @property
    def num_running(self) -> int:
        """Tasks inside `track`."""
        return self._num_running

    def is_released(self, request_id: RequestId) -> bool:
        """Whether `cancel(request_id)` came within the last released_memory_s."""
        released_at = self._released_at.get(request_id)
        return released_at is not None and self._clock() - released_at < self._released_memory_s

    def refuse_released(self, request_id: RequestId) -> None:
        """Raises InstanceLost (code request_released) when the request was released before."""
        if self.is_released(request_id):
            raise _released()

    def note(self, request_id: RequestId, router_id: InstanceId) -> None:
        """Remember whose request this is, until `cancel`. track() does it by itself.

        Raises:
            InstanceLost: code request_released, also when its router has ended.
        """
        self.refuse_released(request_id)
        if self.has_ended(router_id):
            raise _released()
        self._router_of[request_id] = router_id
        self._router_of.move_to_end(request_id)
        if len(self._router_of) > self._max_remembered:
            self._router_of.popitem(last=False)

    @contextmanager
    def track(self, request_id: RequestId, router_id: InstanceId) -> Iterator[None]:
        """The current task works for a request inside this block. Cancelling by `cancel` or `cancel_router` comes out of
        the block as a typed error, so that the bus still answers; a cancellation from elsewhere passes through.

        Raises:
            InstanceLost: code request_released: the request was released, before or during the block.
        """
        self.note(request_id, router_id)
        task = asyncio.current_task()
        assert task is not None, "track() needs a running task"
        running = _Running(request_id, task, task.cancelling())
        self._running.setdefault(request_id, []).append(running)
        self._num_running += 1
        try:
            yield
        except asyncio.CancelledError:
            if running.is_released and task.uncancel() <= running.num_cancelling_before:
                raise _released() from None
            raise
        else:
            if running.is_released:  # the cancellation was swallowed on the way, as Python 3.11's wait_for does at times
                task.uncancel()
                raise _released()
        finally:
            self._forget(running)

    def cancel(self, request_id: RequestId) -> int:
        """End the request's tasks and refuse it from now on. How many tasks were cancelled. Idempotent."""
        self._remember_released(request_id)
        self._router_of.pop(request_id, None)
        running = list(self._running.get(request_id, ()))
        for one in running:
            one.cancel()
        return len(running)

    def cancel_router(self, router_id: InstanceId) -> list[RequestId]:
        """`cancel` for all requests of a router that were seen here, running or ended; their ids, so that the caller frees
        what they hold."""
        request_ids = [request_id for request_id, owner in self._router_of.items() if owner == router_id]
        for request_id in request_ids:
            self.cancel(request_id)
        return request_ids

    def _forget(self, running: _Running) -> None:
        self._num_running -= 1
        remaining = self._running[running.request_id]
        remaining.remove(running)
        if not remaining:
            del self._running[running.request_id]

    def _remember_released(self, request_id: RequestId) -> None:
        now_s = self._clock()
        self._released_at[request_id] = now_s
        self._released_at.move_to_end(request_id)
        while self._released_at:
            oldest_id, released_at = next(iter(self._released_at.items()))
            is_stale = now_s - released_at >= self._released_memory_s
            if not is_stale and len(self._released_at) <= self._max_remembered:
                return
            del self._released_at[oldest_id]


def _released() -> InstanceLost:
    """A router that still wants an answer must begin again, under a new id: this one is refused for a while. (It was silent
    for so long that it counted as lost.)"""
    return InstanceLost("what an instance held for the request was dropped", code="request_released")
