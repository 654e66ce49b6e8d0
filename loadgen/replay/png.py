"""PNG files that differ in a few pixels, each for the price of a checksum: what a picture costs to compress is paid once.

The first row of pixels is stored as it is in a chunk of its own; all other rows are compressed once and never touched again.

  signature IHDR | IDAT: zlib header, first row, stored | IDAT: other rows, compressed | IDAT: Adler-32 | IEND
                 |--- changes with each picture --------|--- the same in all ----------|--- changes ----|
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from PIL import Image

_ADLER_BASE = 65_521  # RFC 1950, 8.2
_NUM_MARKED = 24  # channels of the first row whose two lowest bits tell one picture from the next: 48 bits
MAX_SERIAL = (1 << 2 * _NUM_MARKED) - 1


class PngTemplate:
    """A picture, at least 8 pixels across; `variant` gives it as base64 with an invisible serial number."""

    __slots__ = ("_end", "_fixed", "_fixed_adler", "_fixed_size", "_head", "_middle64", "_row", "height", "width")

    def __init__(self, image: Image.Image) -> None:
        self.width, self.height = image.size
        pixels = np.asarray(image.convert("RGB")).reshape(self.height, 3 * self.width)
        rows = np.pad(pixels, ((0, 0), (1, 0)))  # each row begins with its filter: 0, none
        self._row, rest = rows[0].tobytes(), rows[1:].tobytes()
        self._fixed_adler, self._fixed_size = zlib.adler32(rest), len(rest)
        deflate = zlib.compressobj(level=1, wbits=-zlib.MAX_WBITS)  # drawings are small at any level
        fixed = _chunk(b"IDAT", deflate.compress(rest) + deflate.flush())
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)  # 8 bits, RGB
        self._head = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
        self._cut(fixed)

    def variant(self, serial: int) -> tuple[bytes, bytes, bytes]:
        """The file in base64, in three pieces; the one in the middle, nearly all of it, is shared by all variants."""
        row = bytearray(self._row)
        for place in range(_NUM_MARKED):
            row[1 + place] ^= serial >> 2 * place & 3
        first = self._first_chunk(bytes(row))
        adler = _chunk(b"IDAT", self._adler(row).to_bytes(4, "big"))
        last = adler + _chunk(b"IEND", b"")
        return (
            base64.b64encode(self._head + first + self._fixed),
            self._middle64,
            base64.b64encode(self._end + last),
        )

    def _cut(self, fixed: bytes) -> None:
        """Cuts what never changes where base64, three bytes to four, has its seams."""
        before = len(self._head) + len(self._first_chunk(self._row))
        start = -before % 3
        stop = start + (len(fixed) - start) // 3 * 3
        self._fixed, self._end = fixed[:start], fixed[stop:]
        self._middle64 = base64.b64encode(fixed[start:stop])

    def _first_chunk(self, row: bytes) -> bytes:
        stored = struct.pack("<BHH", 0, len(row), len(row) ^ 0xFFFF) + row  # RFC 1951, 3.2.4: not the last block
        return _chunk(b"IDAT", b"\x78\x01" + stored)

    def _adler(self, row: bytes | bytearray) -> int:
        """Adler-32 (RFC 1950) of the row and then the rest, from the sums of each."""
        low, high = (zlib.adler32(row) & 0xFFFF), zlib.adler32(row) >> 16
        fixed_low, fixed_high = self._fixed_adler & 0xFFFF, self._fixed_adler >> 16
        both_low = (low + fixed_low - 1) % _ADLER_BASE
        both_high = (high + fixed_high + self._fixed_size * (low - 1)) % _ADLER_BASE
        return both_high << 16 | both_low


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
