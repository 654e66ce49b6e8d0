"""DecodePool: bounded, off the loop, and its slots come back however a caller ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from triptych.services.preprocess import decode_pool
from triptych.services.preprocess.decode import DecodedImage, DecodeOptions
from triptych.services.preprocess.decode_pool import DecodePool, default_num_workers
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest, Overloaded

OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.5,) * 3, (0.5,) * 3), "rev", 1_000_000)


class Workers:
    """Stands in for decode_image: blocks until told, and counts."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def decode(self, encoded: bytes, options: DecodeOptions, param: str) -> DecodedImage:
        with self._lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        self.go_on.wait(10)
        with self._lock:
            self.num_at_once -= 1
        if encoded == b"memory":
            raise MemoryError
        raise BadRequest("broken", param=param)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    made = Workers()
    monkeypatch.setattr(decode_pool, "decode_image", made.decode)
    yield made
    made.go_on.set()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - workers are threads, they tell no event
            await asyncio.sleep(0.001)


async def test_bounds(workers: Workers) -> None:
    pool = DecodePool(OPTIONS, num_workers=2, max_waiting=3)
    tasks = [asyncio.create_task(pool.decode(b"", OPTIONS, str(index))) for index in range(5)]
    await _until(lambda: workers.num_at_once == 2 and pool.num_waiting == 3)
    assert pool.num_running == 2
    with pytest.raises(Overloaded):
        await pool.decode(b"", OPTIONS, "one too many")
    workers.go_on.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.param for error in ended if isinstance(error, BadRequest)] == list("01234")
    await _until(lambda: pool.num_running == 0)
    assert (pool.num_waiting, workers.most_at_once) == (0, 2)
    pool.close()


async def test_cancelled_callers_leave_at_once_and_keep_the_bound(workers: Workers) -> None:
    pool = DecodePool(OPTIONS, num_workers=1, max_waiting=3)
    running = asyncio.create_task(pool.decode(b"", OPTIONS, "running"))
    await _until(lambda: workers.num_at_once == 1)
    waiting = asyncio.create_task(pool.decode(b"", OPTIONS, "waiting"))
    await _until(lambda: pool.num_waiting == 1)
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (pool.num_waiting, pool.num_running, workers.num_at_once) == (0, 1, 1)
    after = asyncio.create_task(pool.decode(b"", OPTIONS, "after"))
    await _until(lambda: pool.num_waiting == 1)
    workers.go_on.set()
    with pytest.raises(BadRequest):
        await after
    await _until(lambda: pool.num_running == 0)
    assert workers.most_at_once == 1
    pool.close()


async def test_lack_of_memory_is_overload(workers: Workers) -> None:
    pool = DecodePool(OPTIONS, num_workers=1, max_waiting=1)
    workers.go_on.set()
    with pytest.raises(Overloaded):
        await pool.decode(b"memory", OPTIONS, "big")
    pool.close()


def test_default_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_num_workers(3) == 3
    monkeypatch.setattr(decode_pool.os, "cpu_count", lambda: 64)
    assert default_num_workers(0) == 32
    assert DecodePool(OPTIONS, default_num_workers(0), 1).num_workers == decode_pool.MAX_WORKERS
    monkeypatch.setattr(decode_pool.os, "cpu_count", lambda: None)
    assert default_num_workers(0) == 1
