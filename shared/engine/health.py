"""Whether an engine still works. A device that fell off its bus fails every call from then on: only a new process helps.

Fed by HostContext.compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from triptych.shared.errors import TriptychError

_log = structlog.get_logger(__name__)


class EngineHealth:
    """Event loop only.

    Args:
        max_failures: calls in a row of which nothing came.
        give_up: called once, after so many.
    """

    def __init__(self, max_failures: int, give_up: Callable[[], None]) -> None:
        self._max_failures = max_failures
        self._give_up = give_up
        self._num_failures = 0

    def note(self, outcomes: Sequence[object]) -> None:
        """What a call made of each item of its batch: a result or an exception. One that an engine refused (a TriptychError)
        tells nothing of its health."""
        telling = [outcome for outcome in outcomes if not isinstance(outcome, TriptychError)]
        if not telling:
            return
        if not all(isinstance(outcome, Exception) for outcome in telling):
            self._num_failures = 0
            return
        self._num_failures += 1
        if self._num_failures == self._max_failures:
            _log.error("the engine fails every call: this process gives up", num_failures=self._num_failures)
            self._give_up()
