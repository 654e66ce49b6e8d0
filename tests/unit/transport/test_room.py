"""Waiting for room: in order, bounded, and nothing is lost when a waiter gives up in the moment that it is served."""

from __future__ import annotations

import asyncio

import pytest

from triptych.shared.errors import Overloaded
from triptych.shared.transport import room as room_module
from triptych.shared.transport.arena import Arena
from triptych.shared.transport.room import Room

CAPACITY_BYTES = 64 << 10
WHOLE_BYTES = CAPACITY_BYTES - 64
HALF_BYTES = CAPACITY_BYTES // 2 - 64


@pytest.fixture
def arena() -> Arena:
    return Arena(CAPACITY_BYTES)


@pytest.fixture
def room(arena: Arena) -> Room:
    return Room(arena)


async def waiting(room: Room, num_bytes: int, num_waiting: int, wait_s: float = 5.0) -> asyncio.Task[int]:
    task = asyncio.create_task(room.take(num_bytes, wait_s))
    await asyncio.sleep(0)
    assert room.num_waiting == num_waiting
    return task


async def test_first_come_first_served_large_before_small(room: Room, arena: Arena) -> None:
    first, second = await room.take(HALF_BYTES, 0), await room.take(HALF_BYTES, 0)
    large = await waiting(room, WHOLE_BYTES, 1)
    small = await waiting(room, 10, 2)
    room.give_back(first)
    await asyncio.sleep(0)
    assert not small.done(), "the large one came first"
    room.give_back(second)
    offset = await large
    assert not small.done()
    room.give_back(offset)
    room.give_back(await small)
    assert arena.allocator.used_bytes == 0
    arena.allocator.check_integrity()


async def test_gives_up_in_time_and_lets_the_next_one_through(room: Room) -> None:
    half = await room.take(HALF_BYTES, 0)
    large = await waiting(room, WHOLE_BYTES, 1, wait_s=0.05)
    small = await waiting(room, 10, 2)
    with pytest.raises(Overloaded):
        await large
    room.give_back(await asyncio.wait_for(small, 4.0))
    room.give_back(half)
    assert room.num_waiting == 0


async def test_cancelled_in_the_moment_of_being_served(room: Room, arena: Arena) -> None:
    whole = await room.take(WHOLE_BYTES, 0)
    task = await waiting(room, WHOLE_BYTES, 1)
    room.give_back(whole)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert arena.allocator.used_bytes == 0


async def test_the_number_of_waiters_is_bounded(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MAX_WAITERS", 2)
    await room.take(WHOLE_BYTES, 0)
    tasks = [await waiting(room, 10, 1), await waiting(room, 10, 2)]
    with pytest.raises(Overloaded):
        await room.take(10, 5.0)
    room.close()
    for task in tasks:
        with pytest.raises(Overloaded):
            await task


async def test_larger_than_everything_is_refused_at_once(room: Room) -> None:
    with pytest.raises(Overloaded) as refused:
        await room.take(WHOLE_BYTES + 1, 5.0)
    assert refused.value.code == "tensor_too_large"
    assert refused.value.retry_after_s is None
