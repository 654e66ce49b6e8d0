"""RequestTasks: releases end running tasks, come out typed, and are remembered for a bounded while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest

from triptych.shared.errors import InstanceLost
from triptych.shared.messages import InstanceId, RequestId
from triptych.shared.request_tasks import RequestTasks

R1, R2 = RequestId("r1"), RequestId("r2")
ROUTER_A, ROUTER_B = InstanceId("router-a"), InstanceId("router-b")


async def _work(tasks: RequestTasks, request_id: RequestId, router_id: InstanceId, started: asyncio.Event) -> None:
    with tasks.track(request_id, router_id):
        started.set()
        await asyncio.get_running_loop().create_future()


async def _start(tasks: RequestTasks, request_id: RequestId, router_id: InstanceId = ROUTER_A) -> asyncio.Task[None]:
    started = asyncio.Event()
    task = asyncio.create_task(_work(tasks, request_id, router_id, started))
    await asyncio.wait_for(started.wait(), 5)
    return task


async def _ends_released(task: Awaitable[object]) -> bool:
    with pytest.raises(InstanceLost) as caught:
        await asyncio.wait_for(task, 5)
    return caught.value.code == "request_released"


async def test_cancel_ends_all_tasks_of_one_request_only() -> None:
    tasks = RequestTasks()
    first, second, other = await _start(tasks, R1), await _start(tasks, R1), await _start(tasks, R2)
    assert tasks.num_running == 3
    assert tasks.cancel(R1) == 2
    assert await _ends_released(first)
    assert await _ends_released(second)
    assert not other.done()
    assert tasks.num_running == 1
    tasks.cancel(R2)
    assert await _ends_released(other)
    assert tasks.num_running == 0


async def test_second_cancel_does_not_leak_a_cancellation() -> None:
    """Two releases in a row (a router sends one per stage) must not cancel what the task does after the block."""
    tasks = RequestTasks()
    after: list[int] = []

    async def work(started: asyncio.Event) -> None:
        try:
            with tasks.track(R1, ROUTER_A):
                started.set()
                await asyncio.get_running_loop().create_future()
        except InstanceLost:
            await asyncio.sleep(0)
            current = asyncio.current_task()
            assert current is not None
            after.append(current.cancelling())

    started = asyncio.Event()
    task = asyncio.create_task(work(started))
    await started.wait()
    tasks.cancel(R1)
    tasks.cancel(R1)
    await asyncio.wait_for(task, 5)
    assert after == [0]


async def test_cancellation_from_elsewhere_passes_through() -> None:
    tasks = RequestTasks()
    task = await _start(tasks, R1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tasks.num_running == 0
    assert not tasks.is_released(R1)


async def test_release_and_outer_cancellation_together_stay_a_cancellation() -> None:
    tasks = RequestTasks()
    task = await _start(tasks, R1)
    tasks.cancel(R1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tasks.num_running == 0


async def test_swallowed_cancellation_still_ends_released() -> None:
    """A block that loses the cancellation must not hand out what the release can no longer free."""
    tasks = RequestTasks()

    async def work(started: asyncio.Event) -> int:
        with tasks.track(R1, ROUTER_A):
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        return 1

    started = asyncio.Event()
    task = asyncio.create_task(work(started))
    await started.wait()
    tasks.cancel(R1)
    assert await _ends_released(task)
    assert task.cancelling() == 0


async def test_cancel_router_spares_other_routers() -> None:
    tasks = RequestTasks()
    mine, theirs = await _start(tasks, R1, ROUTER_A), await _start(tasks, R2, ROUTER_B)
    assert tasks.cancel_router(ROUTER_A) == [R1]
    assert await _ends_released(mine)
    assert not theirs.done()
    tasks.cancel(R2)
    assert await _ends_released(theirs)


async def test_cancel_router_names_requests_whose_tasks_ended() -> None:
    """What they leased must be freed too."""
    tasks = RequestTasks()
    with tasks.track(R1, ROUTER_A):
        pass
    tasks.note(R2, ROUTER_A)
    assert tasks.cancel_router(ROUTER_A) == [R1, R2]
    assert tasks.cancel_router(ROUTER_A) == []
    assert tasks.is_released(R1)


async def test_released_before_arrival_is_refused_for_a_while() -> None:
    now_s = [0.0]
    tasks = RequestTasks(released_memory_s=10, clock=lambda: now_s[0])
    assert tasks.cancel(R1) == 0
    with pytest.raises(InstanceLost), tasks.track(R1, ROUTER_A):
        pytest.fail("must not run")
    now_s[0] = 10.0
    with tasks.track(R1, ROUTER_A):
        assert tasks.num_running == 1


async def test_memory_of_released_ids_is_bounded() -> None:
    tasks = RequestTasks(max_remembered=3)
    for index in range(10):
        tasks.cancel(RequestId(str(index)))
    assert [index for index in range(10) if tasks.is_released(RequestId(str(index)))] == [7, 8, 9]


async def test_errors_of_the_block_pass_through() -> None:
    tasks = RequestTasks()
    with pytest.raises(KeyError), tasks.track(R1, ROUTER_A):
        raise KeyError("mine")
    assert tasks.num_running == 0
