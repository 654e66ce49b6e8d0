"""Which picture a file shows, so that a byte-identical one need not be decoded again: remembered in the process, and asked of
the index. What a file shows depends on its bytes and the options in its key alone: an entry is never stale.

Used by the router, for files that clients send, and by preprocess, for those that it downloads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from triptych.cache.index import CacheIndex
from triptych.cache.keys import file_key
from triptych.shared.image_info import ImageInfo

MAX_KNOWN = 20_000  # chosen: about 10 MB
INLINE_BYTES = 64 << 10  # measured: 0.05 ms to hash; a thread costs as much


class KnownFiles:
    """Event loop only; long files are hashed in a thread."""

    def __init__(self, index: CacheIndex, model_revision: str, max_known: int = MAX_KNOWN) -> None:
        self._index = index
        self._model_revision = model_revision
        self._max_known = max_known
        self._images: OrderedDict[bytes, ImageInfo] = OrderedDict()

    async def key_of(self, content: bytes | bytearray, options_key: bytes, cache_salt: bytes) -> bytes:
        """The file's key among requests of one salt. options_key: `ImageOptions.key()`."""

        def hashed() -> bytes:
            view = memoryview(content)
            return file_key(view, model_revision=self._model_revision, options_key=options_key, cache_salt=cache_salt)

        return hashed() if len(content) <= INLINE_BYTES else await asyncio.to_thread(hashed)

    async def find(self, keys: Sequence[bytes]) -> list[ImageInfo | None]:
        """The picture of each file, None where it is unknown: one round trip for all that are not known here."""
        missing = list(dict.fromkeys(key for key in keys if key not in self._images))
        if missing:
            for key, image in zip(missing, await self._index.identify(missing), strict=True):
                if image is not None:
                    self.keep(key, image)
        found = [self._images.get(key) for key in keys]
        for key in keys:
            if key in self._images:
                self._images.move_to_end(key)
        return found

    def keep(self, key: bytes, image: ImageInfo) -> None:
        """Remember it here."""
        self._images[key] = image
        self._images.move_to_end(key)
        if len(self._images) > self._max_known:
            self._images.popitem(last=False)

    def tell(self, key: bytes, image: ImageInfo) -> None:
        """Remember it here, and for all others."""
        self.keep(key, image)
        self._index.remember(key, image)
