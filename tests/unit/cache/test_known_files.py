"""Files whose picture is known: one question for those that are not, bounded, and never shared across salts or options."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from triptych.cache.index import MemoryIndex
from triptych.cache.known_files import INLINE_BYTES, KnownFiles
from triptych.shared.image_info import ImageInfo

IMAGE = ImageInfo(b"h" * 32, 28, 28, (1, 2, 2), 1)


class Asked(MemoryIndex):
    """Remembers what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []

    async def identify(self, file_keys: Sequence[bytes]) -> list[ImageInfo | None]:
        self.asked.append(list(file_keys))
        return await super().identify(file_keys)


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1])
async def test_a_key_depends_on_bytes_options_and_salt(size: int) -> None:
    """Hashed here, or in a thread."""
    files = KnownFiles(MemoryIndex(), "revision")
    key = await files.key_of(b"x" * size, b"options", b"salt")
    assert key == await files.key_of(bytearray(b"x" * size), b"options", b"salt")
    others = [
        await files.key_of(b"x" * (size - 1) + b"y", b"options", b"salt"),
        await files.key_of(b"x" * size, b"other", b"salt"),
        await files.key_of(b"x" * size, b"options", b""),
        await KnownFiles(MemoryIndex(), "other").key_of(b"x" * size, b"options", b"salt"),
    ]
    assert len({key, *others}) == 5


async def test_only_what_is_unknown_is_asked_for_and_once() -> None:
    index = Asked()
    files, other = KnownFiles(index, "revision"), KnownFiles(index, "revision")
    other.tell(b"b", IMAGE)
    files.keep(b"a", IMAGE)
    assert await files.find([b"a", b"b", b"c", b"b"]) == [IMAGE, IMAGE, None, IMAGE]
    assert index.asked == [[b"b", b"c"]]
    assert await files.find([b"a", b"b"]) == [IMAGE, IMAGE]
    assert len(index.asked) == 1
    assert await other.find([b"a"]) == [None], "what was only kept is not told"


async def test_the_least_recently_asked_is_forgotten() -> None:
    files = KnownFiles(MemoryIndex(), "revision", max_known=2)
    for key in (b"a", b"b"):
        files.keep(key, IMAGE)
    await files.find([b"a"])
    files.keep(b"c", IMAGE)
    assert await files.find([b"a", b"b", b"c"]) == [IMAGE, None, IMAGE]
