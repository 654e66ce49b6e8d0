"""A bounded pool of worker processes that decode pictures, for the event loop: waiting is bounded, and so are decoded pictures
that nobody has stored yet. Each process is driven by one thread, which only waits (decode_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych.services.preprocess.decode import DecodeOptions
from triptych.services.preprocess.decode_process import DecodedImage, DecodeProcess
from triptych.shared.errors import Overloaded
from triptych.shared.machine import num_cores
from triptych.shared.settings import Settings

MAX_DEFAULT_WORKERS = 8  # chosen: a picture of 64 Mpx takes 1.2 GB while it is decoded


@dataclass(frozen=True, slots=True)
class TimedImage:
    """A decoded picture, how long it waited for a worker, and how long the worker took."""

    image: DecodedImage
    queued_s: float
    compute_s: float


class DecodePool:
    """At most decode_workers pictures are decoded at a time, at most max_waiting wait for that; more are refused."""

    def __init__(self, settings: Settings) -> None:
        self.num_workers = settings.decode_workers or default_num_workers()
        self.num_waiting = 0
        self.num_running = 0
        self._max_waiting = settings.max_waiting
        self._slots = asyncio.Semaphore(self.num_workers)
        self._executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="decode")
        limits = settings.decode_timeout_s, settings.decode_memory_bytes
        self._processes = [DecodeProcess(*limits) for _ in range(self.num_workers)]
        self._idle: deque[DecodeProcess] = deque()  # the last one to come is the first to go: its memory is warm
        for process in self._processes:
            self._executor.submit(self._warm_up, process)

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    @asynccontextmanager
    async def decoded(self, encoded: bytes | bytearray, options: DecodeOptions, param: str) -> AsyncIterator[TimedImage]:
        """The picture, in its place in the pool until the block ends. A cancelled caller leaves at once; its worker finishes.

        Raises:
            BadRequest, InternalError: see DecodeProcess.decode.
            Overloaded: too many wait, or as there.
        """
        if self.num_waiting >= self._max_waiting:
            raise Overloaded("too many images wait to be decoded: try again later")
        asked_at_s = time.monotonic()
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        begun_at_s = time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._run, encoded, options, param)
        try:
            image = await asyncio.shield(future)
            yield TimedImage(image, begun_at_s - asked_at_s, time.monotonic() - begun_at_s)
        finally:
            future.add_done_callback(self._leave)  # the place is the worker's too

    def _leave(self, future: asyncio.Future[DecodedImage]) -> None:
        self.num_running -= 1
        self._slots.release()
        if not future.cancelled():
            future.exception()  # seen: a cancelled caller no longer looks

    def _run(self, encoded: bytes | bytearray, options: DecodeOptions, param: str) -> DecodedImage:
        """In a thread, of which there are as many as processes: one is idle."""
        process = self._idle.pop()
        try:
            return process.decode(encoded, options, param)
        finally:
            self._idle.append(process)

    def _warm_up(self, process: DecodeProcess) -> None:
        with contextlib.suppress(Overloaded):  # the first picture tries again
            process.start()
        self._idle.append(process)

    def close(self) -> None:
        """Ends all workers. Blocks for as long as a process takes to die."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()


def default_num_workers() -> int:
    """Half of the cores: the engines need the rest."""
    return min(max(1, num_cores() // 2), MAX_DEFAULT_WORKERS)
