"""What the choices of one request about pictures tell each other, so that no picture is uploaded, decoded or encoded for each:
one goes ahead up to its first token; the others then know what the pictures are and where their embeddings are cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych.cache.held_parts import HeldPart
from triptych.shared.errors import DeadlineExceeded
from triptych.shared.image_info import ImageInfo


@dataclass(slots=True)
class Siblings:
    """images: of the request, once they are known; encoded: by mm_hash, who has their embeddings."""

    images: Sequence[ImageInfo] = ()
    encoded: Mapping[bytes, Sequence[HeldPart]] = field(default_factory=dict)
    _is_led: bool = False
    _may_follow: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[None]:
        """The block of the first runs at once; those of the others when it has its first token, or has ended.

        Raises:
            DeadlineExceeded: that took longer than timeout_s.
        """
        if self._is_led:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._may_follow.wait()
            except TimeoutError:
                raise DeadlineExceeded() from None
        self._is_led = True
        try:
            yield
        finally:
            self._may_follow.set()

    def tell(self, images: Sequence[ImageInfo], encoded: Mapping[bytes, Sequence[HeldPart]]) -> None:
        """By the one that went ahead: it has its first token."""
        self.images, self.encoded = images, encoded
        self._may_follow.set()
