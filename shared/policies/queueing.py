"""In which order what waits in a stage is served. Pure: used by the queues of encoder and prefill, and by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

NO_TARGET_SLACK_S = 10.0  # chosen: what nobody set a target for is for somebody who watches a cursor blink
LATE_FACTOR = 4.0  # chosen: who waits longer than this many targets has probably left
MIN_SLACK_S = 0.5  # chosen: one that arrives too late already makes way for others, too, for LATE_FACTOR of these


class Queued(Protocol):
    """What waits: arrived_at_s: when it did, on the clock of now_s. slack_s: from then on until its first token is due; None:
    no target. work_s: of computing that is left for it."""

    @property
    def arrived_at_s(self) -> float: ...

    @property
    def slack_s(self) -> float | None: ...

    @property
    def work_s(self) -> float: ...


Item = TypeVar("Item", bound=Queued)


class QueueOrder(Protocol):
    """Who is served first. Equal ones stay in the order that they are given in."""

    def __call__(self, items: Sequence[Item], now_s: float) -> list[Item]: ...


def fcfs(items: Sequence[Item], now_s: float) -> list[Item]:
    """First come, first served."""
    return sorted(items, key=lambda item: item.arrived_at_s)


def by_slack(items: Sequence[Item], now_s: float) -> list[Item]:
    """Slack with aging. Ours: ModServe names SLO-driven scheduling, but publishes no formula.

    A request must begin work_s before it is due, and as long as it can still be in time, requests go by that last moment. One
    that can't any more makes way for those that can, but not for ever: until LATE_FACTOR times its slack after its arrival.
    So what arrives after that (`overtaken_until_s`) never overtakes it, however large it is.
    """
    return sorted(items, key=lambda item: _moment_s(item, now_s))


def overtaken_until_s(item: Queued) -> float:
    """What arrives later than this is always served after the item."""
    return item.arrived_at_s + LATE_FACTOR * max(_slack_s(item), MIN_SLACK_S)


def _moment_s(item: Queued, now_s: float) -> float:
    """Never before its arrival: else a large one with little slack would overtake those whose time has come. What has no target
    counts as no work, so that it is served in order."""
    begin_s = item.arrived_at_s + _slack_s(item) - (0.0 if item.slack_s is None else item.work_s)
    return max(begin_s, item.arrived_at_s) if begin_s >= now_s else overtaken_until_s(item)


def _slack_s(item: Queued) -> float:
    return NO_TARGET_SLACK_S if item.slack_s is None else item.slack_s
