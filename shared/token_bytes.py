"""Token ids as they travel in messages and blobs: little-endian uint32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

BYTES_PER_TOKEN = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Four bytes for each token id."""
    tokens = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse; data has a whole number of tokens."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
