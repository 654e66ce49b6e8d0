"""DecodePool: bounded, off the loop, and its places come back however a caller ends."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from triptych.services.preprocess import decode_pool
from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_pool import DecodePool, default_num_workers
from triptych.services.preprocess.decode_process import DecodedImage
from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import BadRequest, Overloaded
from triptych.shared.image_info import ImageInfo
from triptych.shared.settings import Settings

OPTIONS = DecodeOptions(ImageOptions(14, 2, 2, 3136, 200704, (0.5,) * 3, (0.5,) * 3), "rev", 1_000_000)
INFO = ImageInfo(b"h" * 32, 28, 28, (1, 2, 2), 1)


class Workers:
    """Stands in for the processes: blocks until told, and counts."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def decode(self, encoded: bytes) -> DecodedImage:
        with self._lock:
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        self.go_on.wait(10)
        with self._lock:
            self.num_at_once -= 1
        if encoded == b"good":
            return DecodedImage(INFO, mmap.mmap(-1, 28 * 28 * 3))
        raise BadRequest("broken", code="invalid_image")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    made = Workers()

    class Process:
        pid = 1

        def __init__(self, cpu_s: float, memory_bytes: int) -> None:
            self._is_busy = False

        def start(self) -> None:
            if self._is_busy:
                raise AssertionError("started twice")

        def decode(self, encoded: bytes, options: DecodeOptions, param: str) -> DecodedImage:
            assert not self._is_busy
            self._is_busy = True
            try:
                return made.decode(encoded)
            finally:
                self._is_busy = False

        def close(self) -> None:
            made.go_on.set()

    monkeypatch.setattr(decode_pool, "DecodeProcess", Process)
    yield made
    made.go_on.set()


def _pool(num_workers: int, max_waiting: int) -> DecodePool:
    return DecodePool(Settings(decode_workers=num_workers, max_waiting=max_waiting))


async def _decode(pool: DecodePool, encoded: bytes = b"", hold: asyncio.Event | None = None) -> ImageInfo:
    async with pool.decoded(encoded, OPTIONS, "p") as timed:
        if hold is not None:
            await hold.wait()
        return timed.image.info


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - workers are threads, they tell no event
            await asyncio.sleep(0.001)


async def test_bounds(workers: Workers) -> None:
    pool = _pool(num_workers=2, max_waiting=3)
    tasks = [asyncio.create_task(_decode(pool)) for _ in range(5)]
    await _until(lambda: workers.num_at_once == 2 and pool.num_waiting == 3)
    assert pool.num_running == 2
    with pytest.raises(Overloaded):
        await _decode(pool)
    workers.go_on.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [BadRequest] * 5
    await _until(lambda: pool.num_running == 0)
    assert (pool.num_waiting, workers.most_at_once) == (0, 2)
    pool.close()


async def test_what_is_decoded_keeps_its_place_until_it_is_stored(workers: Workers) -> None:
    """Else any number of decoded pictures could wait for room."""
    workers.go_on.set()
    pool = _pool(num_workers=1, max_waiting=3)
    stored = asyncio.Event()
    first = asyncio.create_task(_decode(pool, b"good", stored))
    second = asyncio.create_task(_decode(pool, b"good"))
    await _until(lambda: pool.num_running == 1 and pool.num_waiting == 1 and workers.most_at_once == 1)
    assert not second.done()
    stored.set()
    assert await first == await second == INFO
    await _until(lambda: pool.num_running == 0)
    pool.close()


async def test_cancelled_callers_leave_at_once_and_keep_the_bound(workers: Workers) -> None:
    pool = _pool(num_workers=1, max_waiting=3)
    running = asyncio.create_task(_decode(pool))
    await _until(lambda: workers.num_at_once == 1)
    waiting = asyncio.create_task(_decode(pool))
    await _until(lambda: pool.num_waiting == 1)
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (pool.num_waiting, pool.num_running, workers.num_at_once) == (0, 1, 1)
    after = asyncio.create_task(_decode(pool))
    await _until(lambda: pool.num_waiting == 1)
    workers.go_on.set()
    with pytest.raises(BadRequest):
        await after
    await _until(lambda: pool.num_running == 0)
    assert workers.most_at_once == 1
    pool.close()


def test_default_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, expected in ((1, 1), (2, 1), (8, 4), (64, decode_pool.MAX_DEFAULT_WORKERS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=num_cores: set(range(n)), raising=False)
        assert default_num_workers() == expected
