"""Modelled time: calls take turns, last as long as they say, and what is cancelled still lasts."""

from __future__ import annotations

import asyncio
import time

import pytest

from triptych.shared.engine.emulated_calls import EmulatedCalls


def call(calls: EmulatedCalls, log: list[str], name: str, modelled_s: float) -> str:
    log.append(name)
    calls.spend(modelled_s)
    return name


async def test_calls_take_turns_and_their_time() -> None:
    calls, log = EmulatedCalls(time_scale=10.0), list[str]()
    began_s = time.monotonic()
    given = await asyncio.gather(*(calls.run(call, calls, log, name, 0.5) for name in "abc"))
    assert given == log == ["a", "b", "c"]
    assert time.monotonic() - began_s >= 3 * 0.05 - 0.005


async def test_what_follows_at_once_begins_where_the_last_call_ended() -> None:
    """Timers count whole milliseconds: without this each step of a long decode would be late by a part of one."""
    calls, log = EmulatedCalls(time_scale=1.0), list[str]()
    await calls.run(call, calls, log, "first", 0.02)
    first_end_s = calls._free_at_s
    for _ in range(10):
        await calls.run(call, calls, log, "next", 0.0201)
    num_ms = 1000 * (calls._free_at_s - first_end_s)
    assert num_ms >= 200.9
    assert time.monotonic() >= calls._free_at_s - 0.0011


async def test_an_error_comes_after_its_time_and_the_next_call_is_made() -> None:
    calls, log = EmulatedCalls(time_scale=1.0), list[str]()

    def fail() -> None:
        calls.spend(0.05)
        raise ValueError("broken")

    began_s = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        await calls.run(fail)
    assert time.monotonic() - began_s >= 0.045
    assert await calls.run(call, calls, log, "next", 0.0) == "next"


async def test_a_cancelled_call_that_runs_lasts_and_one_that_waits_is_never_made() -> None:
    calls, log = EmulatedCalls(time_scale=1.0), list[str]()
    running = asyncio.create_task(calls.run(call, calls, log, "runs", 0.1))
    waiting = asyncio.create_task(calls.run(call, calls, log, "waits", 0.1))
    await asyncio.sleep(0)
    began_s = time.monotonic()
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait((waiting,))
    assert time.monotonic() - began_s < 0.09
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began_s >= 0.09
    assert log == ["runs"]


async def test_calls_shorter_than_the_loop_needs_leave_others_their_turns() -> None:
    """At a fast time scale steps are modelled in less than they take here: heartbeats and joins must not wait for their end."""
    calls, log, num_turns = EmulatedCalls(time_scale=1000.0), list[str](), 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(100):
        await calls.run(call, calls, log, "step", 0.001)
    task.cancel()
    assert num_turns >= 100


async def test_what_the_machine_does_not_keep_up_with_is_told() -> None:
    """Steps that take 5 ms here and are modelled in 1 ms."""
    calls, begun_s = EmulatedCalls(time_scale=1.0), time.monotonic()

    def slow() -> None:
        calls.spend(0.001)
        time.sleep(0.005)

    for _ in range(20):
        await calls.run(slow)
    passed_s = time.monotonic() - begun_s
    assert calls.lost_s + calls.lag_s == pytest.approx(passed_s - 20 * 0.001, abs=0.01)


async def test_steps_known_ahead_take_their_time_as_one_call() -> None:
    calls, began_s = EmulatedCalls(time_scale=10.0), time.monotonic()
    assert await calls.run_steps([0.5, 0.25, 0.25]) == 3
    assert calls._free_at_s - began_s == pytest.approx(0.1, abs=0.01)
    assert time.monotonic() >= calls._free_at_s - 0.0011


async def test_hurry_ends_what_is_known_ahead_after_the_step_under_way() -> None:
    calls, began_s = EmulatedCalls(time_scale=1.0), time.monotonic()
    asyncio.get_running_loop().call_later(0.07, calls.hurry)
    num_made = await calls.run_steps([0.05] * 100)
    assert 2 <= num_made < 50
    assert calls._free_at_s - began_s == pytest.approx(0.05 * num_made, abs=0.01)


async def test_a_call_that_is_asked_for_has_its_turn_after_the_step_under_way() -> None:
    calls, log = EmulatedCalls(time_scale=1.0), list[str]()
    steps = asyncio.create_task(calls.run_steps([0.05] * 100))
    await asyncio.sleep(0)
    await calls.run(call, calls, log, "prompt", 0.1)
    assert steps.done()
    num_made = steps.result()
    assert num_made < 50
    assert await calls.run_steps([0.001] * 5) == 5, "the hurry is over"


async def test_a_cancelled_step_lasts() -> None:
    calls, began_s = EmulatedCalls(time_scale=1.0), time.monotonic()
    steps = asyncio.create_task(calls.run_steps([0.1] * 50))
    await asyncio.sleep(0)
    steps.cancel()
    with pytest.raises(asyncio.CancelledError):
        await steps
    assert 0.09 <= time.monotonic() - began_s < 4.0


@pytest.mark.parametrize(
    ("lag_s", "asked_after_s", "is_made_up_for"),
    [(0.009, 0.001, True), (0.009, -0.1, True), (0.009, 0.003, False), (0.011, 0.001, False)],
    ids=["at once", "it waited", "it was not there", "too late"],
)
async def test_a_late_result_is_made_up_for_by_what_follows_at_once(
    lag_s: float, asked_after_s: float, is_made_up_for: bool
) -> None:
    calls, given_at_s = EmulatedCalls(time_scale=1.0), time.monotonic()
    calls._free_at_s, calls._given_at_s, calls.lag_s = given_at_s - lag_s, given_at_s, lag_s
    began_s = calls._begin(given_at_s + asked_after_s)
    assert (began_s == calls._free_at_s) is is_made_up_for
    assert calls.lost_s == (0 if is_made_up_for else lag_s)
