"""EngineThread and the isolation of failures: order, cancellation, one bad item."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Sequence

import pytest

from triptych.shared.engine import loop as loop_module
from triptych.shared.engine.isolate import as_typed, each_alone
from triptych.shared.engine.loop import StepLoop
from triptych.shared.engine.shared_cores import Rank
from triptych.shared.engine.thread import POLL_S, EngineThread, Turn
from triptych.shared.errors import BadRequest, InternalError

TIMEOUT_S = 5.0


async def test_calls_run_in_order_on_one_thread_off_the_loop() -> None:
    thread = EngineThread()
    seen: list[tuple[int, int]] = []
    await asyncio.gather(*(thread.run(lambda i=i: seen.append((i, threading.get_ident()))) for i in range(20)))
    assert [i for i, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    thread.close()


async def test_a_cancelled_caller_leaves_after_its_call() -> None:
    """Even when it is cancelled twice; a call that has not begun is dropped."""
    thread = EngineThread()
    gate, begun, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(TIMEOUT_S)
        done.set()

    running = asyncio.create_task(thread.run(work))
    queued = asyncio.create_task(thread.run(lambda: pytest.fail("it was dropped")))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    for _ in range(2):
        running.cancel()
        queued.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    gate.set()
    results = await asyncio.gather(running, queued, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    assert done.is_set()
    thread.close()


class Watched:
    """Cores that tell what is done with them."""

    def __init__(self) -> None:
        self.seen: list[str | int] = []
        self.has_left = asyncio.Event()
        self.others: list[Rank] = []

    def take(self, rank: Rank) -> None:
        self.seen.append(threading.get_ident())

    def take_again(self) -> None:
        self.take(Rank.LAST)

    def rest(self) -> None:
        self.seen.append("rests")

    def others_compute(self, rank: Rank) -> bool:
        return rank in self.others

    def leave(self) -> None:
        self.seen.append("left")
        self.has_left.set()


async def test_an_engine_holds_its_cores_from_step_to_step_and_leaves_them_once_it_rests() -> None:
    thread, cores = EngineThread(), Watched()
    thread.cores = cores
    ident = await thread.run(threading.get_ident)
    await thread.run(lambda: None)
    assert cores.seen == [ident, "rests"] * 2, "taken where torch counts its threads, and not left between two steps"
    await asyncio.wait_for(cores.has_left.wait(), TIMEOUT_S)
    assert cores.seen == [ident, "rests"] * 2 + ["left"]
    thread.close()


@pytest.mark.parametrize("others", [Rank.LONG, Rank.BRIEF])
async def test_a_call_lets_others_be_first_for_as_long_as_it_is_told(others: Rank) -> None:
    thread, cores = EngineThread(), Watched()
    thread.cores, cores.others = cores, [others]

    def turn(wait_s: float, wait_for_the_rest_s: float) -> Turn:
        waits_s = (wait_s, wait_for_the_rest_s) if others == Rank.LONG else (wait_for_the_rest_s, wait_s)
        return Turn(Rank.LAST, *waits_s)

    async with asyncio.timeout(TIMEOUT_S):
        ident = await thread.run_in_turn(turn(0.0, math.inf), threading.get_ident)
        assert cores.seen == [ident, "rests"], "those that it would wait for are not there"
        cores.seen.clear()
        began_s = time.monotonic()
        await thread.run_in_turn(turn(2 * POLL_S, 0.0), lambda: None)
        assert time.monotonic() - began_s >= 2 * POLL_S
        assert cores.seen[0] == "left", "it keeps nothing from them meanwhile"
        assert cores.seen[-2:] == [ident, "rests"]
        waiting = asyncio.create_task(thread.run_in_turn(turn(math.inf, 0.0), lambda: None))
        assert not (await asyncio.wait([waiting], timeout=3 * POLL_S))[0], "no longer than others compute, but as long"
        cores.others = []
        await waiting
    thread.close()


async def test_an_exception_comes_out() -> None:
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    thread.close()


def test_one_bad_item_fails_alone() -> None:
    calls: list[list[int]] = []

    def halve(items: Sequence[int]) -> list[float]:
        calls.append(list(items))
        return [10 / item for item in items]

    first, second, third = each_alone(halve, [5, 0, 2])
    assert (first, third) == (2.0, 5.0)
    assert isinstance(second, ZeroDivisionError)
    assert calls == [[5, 0, 2], [5], [0], [2]]
    assert each_alone(halve, []) == []


def test_errors_get_a_type_without_their_text() -> None:
    bad = BadRequest("say more")
    assert as_typed(bad, "it") is bad
    internal = as_typed(ValueError("/a/path"), "encoding")
    assert isinstance(internal, InternalError)
    assert internal.message == "encoding failed"


async def test_a_loop_sleeps_without_work_and_survives_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "ERROR_PAUSE_S", 0.0)
    work = [1, 0, 2]
    done: list[int] = []
    errors: list[Exception] = []

    async def step() -> bool:
        if not work:
            return False
        item = work.pop(0)
        done.append(2 // item)
        return True

    loop = StepLoop("test", step, errors.append)
    loop.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (done, [type(error) for error in errors]) == ([2, 1], [ZeroDivisionError])
    assert not loop.is_stepping
    work.append(1)
    loop.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert done == [2, 1, 2]
    await loop.stop()


async def test_a_step_that_always_fails_leaves_room_for_others_and_never_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "ERROR_PAUSE_S", 0.001)
    num_steps = 0
    three = asyncio.Event()

    async def step() -> bool:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            three.set()
        assert num_steps < 10_000, "it never let go of the event loop"
        raise ZeroDivisionError

    def on_error(error: Exception) -> None:
        raise KeyError("a bug in the cleaning up, too")

    loop = StepLoop("test", step, on_error)
    loop.start()
    await asyncio.wait_for(three.wait(), TIMEOUT_S)
    await loop.stop()
    assert num_steps < 100
