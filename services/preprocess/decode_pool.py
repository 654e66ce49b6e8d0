"""Runs decode_image in a bounded pool of workers, off the event loop. Threads: Pillow and blake3 release the interpreter
lock. A pool of processes can take their place: arguments and results are plain bytes and frozen data.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from triptych.services.preprocess.decode import DecodedImage, DecodeOptions, decode_image
from triptych.shared.errors import Overloaded

MAX_WORKERS = 8  # chosen: 64 Mpx take about 0.5 GB each while they are decoded


@dataclass(frozen=True, slots=True)
class TimedImage:
    """A decoded picture, how long it waited for a worker, and how long the worker took."""

    image: DecodedImage
    queued_s: float
    compute_s: float


class DecodePool:
    """At most num_workers pictures are decoded at a time, at most max_waiting wait for that; more are refused."""

    def __init__(self, options: DecodeOptions, num_workers: int, max_waiting: int) -> None:
        self.num_workers = max(1, min(num_workers, MAX_WORKERS))
        self.num_waiting = 0
        self.num_running = 0
        self._max_waiting = max_waiting
        self._slots = asyncio.Semaphore(self.num_workers)
        self._executor = ThreadPoolExecutor(self.num_workers, thread_name_prefix="decode")
        # Pillow itself refuses what is over twice this, where opening costs memory already; our own check comes after it
        Image.MAX_IMAGE_PIXELS = options.max_image_pixels
        warnings.filterwarnings("ignore", module=r"PIL\.")  # a client's broken EXIF block is nothing for our log

    async def decode(self, encoded: bytes | bytearray, options: DecodeOptions, param: str) -> TimedImage:
        """decode_image in a worker. A cancelled caller leaves at once; its worker finishes the picture and drops it.

        Raises:
            BadRequest: see decode_image.
            Overloaded: too many wait, or there is no memory for the picture.
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
        # the slot belongs to the worker, not to the caller, who may be cancelled long before the worker ends
        future = asyncio.get_running_loop().run_in_executor(self._executor, decode_image, encoded, options, param)
        future.add_done_callback(self._on_done)
        try:
            image = await asyncio.shield(future)
        except MemoryError:
            raise Overloaded("there is no memory for the image now: try again later") from None
        return TimedImage(image, begun_at_s - asked_at_s, time.monotonic() - begun_at_s)

    def _on_done(self, future: asyncio.Future[DecodedImage]) -> None:
        self.num_running -= 1
        self._slots.release()
        if not future.cancelled():
            future.exception()  # seen: a cancelled caller no longer looks

    def close(self) -> None:
        """Without waiting for pictures being decoded."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def default_num_workers(num_threads: int) -> int:
    """num_threads when it is set, else half of this machine's cores: the engines need the rest."""
    return num_threads or max(1, (os.cpu_count() or 1) // 2)
