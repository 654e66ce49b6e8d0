"""Watchdog: what is a dead target, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.watchdog import SUSPECT_AFTER, Watchdog


def outcome(error: str | None = None) -> RequestOutcome:
    return RequestOutcome(0, "text", 0, 1.0, 1.002, 2.0, error=error)


async def seen(errors: list[str | None], answers: Iterator[bool], dead_after_s: float = 0.0) -> tuple[bool, bool]:
    """Whether it's dead after these outcomes and probes, and whether sending was stopped."""
    stop = asyncio.Event()
    all_asked = asyncio.Event()

    async def is_there() -> bool:
        answer = next(answers, None)
        if answer is None:
            all_asked.set()
        return answer is not False

    watchdog = Watchdog(is_there, stop, dead_after_s)
    for error in errors:
        watchdog.see(outcome(error))
    watching = asyncio.create_task(watchdog.watch())
    waits = [asyncio.create_task(event.wait()) for event in (stop, all_asked)]
    await asyncio.wait({watching, *waits}, timeout=1.0 if dead_after_s else 0.2, return_when=asyncio.FIRST_COMPLETED)
    for task in (watching, *waits):
        task.cancel()
    return watchdog.is_dead, stop.is_set()


async def test_connections_that_fail_and_a_probe_that_fails() -> None:
    assert await seen(["connection"] * SUSPECT_AFTER, iter([False] * 9)) == (True, True)


async def test_a_target_that_answers_again_lives() -> None:
    assert await seen(["connection"] * SUSPECT_AFTER, iter([False, True]), dead_after_s=60.0) == (False, False)


async def test_a_few_failures_are_no_death() -> None:
    assert await seen(["connection"] * (SUSPECT_AFTER - 1), iter([False])) == (False, False)
    mixed = ["connection", "connection", None, "connection", "connection", "http_503", "connection", "connection"]
    assert await seen(mixed, iter([False])) == (False, False)
    assert await seen(["timeout", "broken_stream"] * 20, iter([False])) == (False, False)


async def test_a_last_look() -> None:
    async def gone() -> bool:
        return False

    watchdog = Watchdog(gone, asyncio.Event())
    await watchdog.look_once()
    assert not watchdog.is_dead
    for _ in range(SUSPECT_AFTER):
        watchdog.see(outcome("connection"))
    await watchdog.look_once()
    assert watchdog.is_dead
