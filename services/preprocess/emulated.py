"""Stands in for decode_pool.py where time is modelled: a picture's header is read, its pixels are not, and the time that a core
would need to decode and resize it passes. Pictures of equal bytes are equal. No torch, no numpy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from triptych.cache.keys import file_key
from triptych.services.preprocess.decode import DecodeOptions, picture_size
from triptych.services.preprocess.decode_pool import TimedImage
from triptych.services.preprocess.decode_process import DecodedImage
from triptych.shared.checkpoint import grid_thw, resized
from triptych.shared.cost_model.images import NativeResolution
from triptych.shared.emulation import cost_model_of, num_slots
from triptych.shared.errors import Overloaded
from triptych.shared.image_info import ImageInfo
from triptych.shared.settings import Settings


class EmulatedDecoder:
    """As DecodePool: so many cores at a time, at most max_waiting pictures wait for one; more are refused."""

    def __init__(self, settings: Settings) -> None:
        self._cost = cost_model_of(settings)
        self._time_scale = settings.time_scale
        self._max_waiting = settings.max_waiting
        self._cores = asyncio.Semaphore(settings.decode_workers or self._cost.unknowns.preprocess_cores)
        self.num_waiting = 0
        self.num_running = 0

    @asynccontextmanager
    async def decoded(self, encoded: bytes | bytearray, options: DecodeOptions, param: str) -> AsyncIterator[TimedImage]:
        """What would have been made of the picture, after the time that it would have taken.

        Raises:
            BadRequest: it is no picture, or too large.
            Overloaded: too many wait.
        """
        if self.num_waiting >= self._max_waiting:
            raise Overloaded("too many images wait to be decoded: try again later")
        asked_at_s = time.monotonic()
        self.num_waiting += 1
        try:
            await self._cores.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            begun_at_s = time.monotonic()
            width, height = picture_size(bytes(encoded), options, param)
            info = self._info(width, height, options, _mm_hash(encoded, options))
            await asyncio.sleep(self._cost.preprocess_s(width, height) / self._time_scale)
            yield TimedImage(DecodedImage(info, b""), begun_at_s - asked_at_s, time.monotonic() - begun_at_s)
        finally:
            self.num_running -= 1
            self._cores.release()

    def _info(self, width: int, height: int, options: DecodeOptions, mm_hash: bytes) -> ImageInfo:
        """The emulated engine finds pieces and patches in the grid. Where the family has no one size for a picture, the size is
        that of the picture as it was sent."""
        if isinstance(self._cost.images, NativeResolution):
            size = resized(height, width, options.image)
            shape = NativeResolution(options.image).shape(width, height)
            grid = grid_thw(*size, options.image)
        else:
            size, shape = (height, width), self._cost.image(width, height)
            grid = (shape.num_pieces, 1, shape.patches_per_piece)
        return ImageInfo(mm_hash, *size, grid, num_slots(self._cost, shape.num_tokens), shape.num_pieces)

    def close(self) -> None:
        """It owns no processes."""


def _mm_hash(encoded: bytes | bytearray, options: DecodeOptions) -> bytes:
    return file_key(
        memoryview(encoded),
        model_revision=options.model_revision,
        options_key=options.image.key(),
        cache_salt=options.tenant_salt,
    )
