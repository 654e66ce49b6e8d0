"""In which order what waits in a stage is served. Pure: used by the queues of encoder and prefill, and by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

NO_TARGET_FACTOR = 5.0  # without a target: so many times what it takes alone, as both papers' SLOs are
NO_TARGET_SLACK_S = 10.0  # and at most this, chosen: nobody watches a cursor blink for longer
LATE_FACTOR = 4.0  # chosen: who waits longer than this many targets has probably left
MIN_SLACK_S = 0.5  # chosen: one that arrives too late already makes way for others, too, for LATE_FACTOR of these at most


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
    So what arrives after that (`overtaken_until_s`) never overtakes it, however large it is; and a short one, for which others
    hardly wait, hardly waits for them. Without a target, what is short goes before what is long, for a time: a follow-up that
    is nearly all cached does not wait for somebody's new document.
    """
    return sorted(items, key=lambda item: _moment_s(item, now_s))


def overtaken_until_s(item: Queued) -> float:
    """What arrives later than this is always served after the item."""
    if item.slack_s is None:
        return item.arrived_at_s + _untargeted_s(item)
    return item.arrived_at_s + LATE_FACTOR * max(item.slack_s, min(MIN_SLACK_S, NO_TARGET_FACTOR * item.work_s))


def _moment_s(item: Queued, now_s: float) -> float:
    """Never before its arrival: else a large one with little slack would overtake those whose time has come."""
    if item.slack_s is None:
        return overtaken_until_s(item)
    begin_s = item.arrived_at_s + item.slack_s - item.work_s
    return max(begin_s, item.arrived_at_s) if begin_s >= now_s else overtaken_until_s(item)


def _untargeted_s(item: Queued) -> float:
    """How long after its arrival it should begin."""
    return min((NO_TARGET_FACTOR - 1.0) * item.work_s, NO_TARGET_SLACK_S)
