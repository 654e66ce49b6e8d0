"""Which router each request belongs to, for as long as an instance may hold anything for it. Event loop only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from triptych.shared.messages import InstanceId, RequestId


class RequestOwners:
    """A request is noted when it comes and forgotten when it is released; should no release ever come, it is forgotten
    some time after its deadline, when everything held for it has expired.

    Args:
        clock: seconds, monotonic; given in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: OrderedDict[RequestId, tuple[InstanceId, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, request_id: RequestId, router_id: InstanceId, keep_s: float) -> None:
        """The request is router_id's, for keep_s seconds or until forgotten."""
        now_s = self._clock()
        self._owners[request_id] = (router_id, now_s + keep_s)
        self._owners.move_to_end(request_id)
        while self._owners:
            oldest_id, (_, until_s) = next(iter(self._owners.items()))
            if until_s >= now_s:
                return
            del self._owners[oldest_id]

    def forget(self, request_id: RequestId) -> None:
        self._owners.pop(request_id, None)

    def of(self, router_id: InstanceId) -> list[RequestId]:
        """The requests of a router."""
        return [request_id for request_id, (owner, _) in self._owners.items() if owner == router_id]
