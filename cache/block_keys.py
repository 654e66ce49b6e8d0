"""Keys of KV blocks: each names all that its block's KV depends on, the whole prompt up to its end. Pure.

root_key commits to the model's revision and to the tenant's salt, BlockChain to the tokens and pictures. See keys.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from triptych.cache.keys import KEY_BYTES, MM_HASH_BYTES, begin_digest

ROOT_KEY_TAG = b"triptych root_key v1"  # changes whenever the content of a block is written in another way
MAX_PACKED_KEYS_BYTES = 32 << 10  # chosen: half of the largest message; 1,024 blocks

_IMAGE_MARKER = 0xFFFFFFFF  # no vocabulary has this token id
_IMAGE_MARKER_BYTES = _IMAGE_MARKER.to_bytes(4, "little")
_IMAGE_RUN = struct.Struct("<I32sII")  # marker, mm_hash, offset in the image, number of placeholders
_TOKEN_BYTES = 4

TokenIds = Sequence[int] | npt.NDArray[np.uint32]


def root_key(model_revision: str, block_size: int, cache_salt: bytes = b"", image_set: Sequence[bytes] = ()) -> bytes:
    """What the first block of a prompt has for a parent. image_set: for cross-attention models, where even text before a
    picture sees it, the mm_hashes of all pictures of the request, in order."""
    size = block_size.to_bytes(8, "little")
    return begin_digest(ROOT_KEY_TAG, model_revision.encode(), size, cache_salt, *image_set).digest()


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as they travel, one after another."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """The reverse of pack_keys.

    Raises:
        ValueError: not a whole number of keys.
    """
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a number of {KEY_BYTES}-byte keys")
    return [packed[begin : begin + KEY_BYTES] for begin in range(0, len(packed), KEY_BYTES)]


@dataclass(slots=True)
class BlockChain:
    """The block keys of a growing prompt. A key is the digest of the key before it and of what its block holds:

        text token          token id, uint32
        run of placeholders 0xFFFFFFFF, mm_hash, offset in the image, number of them in this block

    keys: of the full blocks. tail: what the unfinished one holds so far.
    """

    root: bytes
    block_size: int
    keys: list[bytes] = field(default_factory=list)
    tail: bytes = b""
    _num_in_tail: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.keys) * self.block_size + self._num_in_tail

    def extend(self, token_ids: TokenIds) -> None:
        """Append text tokens.

        Raises:
            ValueError: one of them is no token id.
        """
        ids = np.asarray(token_ids, dtype="<u4")
        if _IMAGE_MARKER in ids:
            raise ValueError(f"{_IMAGE_MARKER} is not a token id")
        content = ids.tobytes()
        begin = 0
        while begin < len(content):
            end = min(begin + (self.block_size - self._num_in_tail) * _TOKEN_BYTES, len(content))
            self._append(content[begin:end], (end - begin) // _TOKEN_BYTES)
            begin = end

    def append_image(self, mm_hash: bytes, num_tokens: int) -> None:
        """Append all placeholders of one image."""
        if len(mm_hash) != MM_HASH_BYTES:
            raise ValueError(f"{len(mm_hash)} bytes are not an mm_hash")
        offset = 0
        while offset < num_tokens:
            num_placeholders = min(self.block_size - self._num_in_tail, num_tokens - offset)
            self._append(_IMAGE_RUN.pack(_IMAGE_MARKER, mm_hash, offset, num_placeholders), num_placeholders)
            offset += num_placeholders

    def packed(self) -> bytes:
        """Root and keys for a message; empty when they are too many for one."""
        packed = pack_keys((self.root, *self.keys))
        return packed if len(packed) <= MAX_PACKED_KEYS_BYTES else b""

    @classmethod
    def resume(cls, packed: bytes, tail: bytes, block_size: int) -> BlockChain:
        """The chain of which `packed()` and `tail` came in a message.

        Raises:
            ValueError: they are of no chain with such blocks.
        """
        root, *keys = unpack_keys(packed)
        num_in_tail = _num_tokens(tail)
        if num_in_tail >= block_size:
            raise ValueError(f"{num_in_tail} tokens are more than an unfinished block of {block_size} has")
        return cls(root, block_size, keys, tail, num_in_tail)

    def _append(self, content: bytes, num_tokens: int) -> None:
        self.tail += content
        self._num_in_tail += num_tokens
        if self._num_in_tail == self.block_size:
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(blake3(parent + self.tail).digest())
            self.tail, self._num_in_tail = b"", 0


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """An image's num_tokens placeholders start at `offset` of a prompt."""

    mm_hash: bytes
    offset: int
    num_tokens: int


def prompt_chain(token_ids: TokenIds, places: Iterable[ImagePlace], block_size: int, root: bytes) -> BlockChain:
    """The chain of a prompt. token_ids: the unified sequence, whose placeholders may have any id. places: its images, sorted.

    Raises:
        ValueError: images overlap or lie outside of the prompt.
    """
    chain = BlockChain(root, block_size)
    for place in places:
        if not chain.num_tokens <= place.offset <= place.offset + place.num_tokens <= len(token_ids):
            raise ValueError(f"{place.num_tokens} placeholders at {place.offset} overlap others or the prompt's end")
        chain.extend(token_ids[chain.num_tokens : place.offset])
        chain.append_image(place.mm_hash, place.num_tokens)
    chain.extend(token_ids[chain.num_tokens :])
    return chain


def _num_tokens(content: bytes) -> int:
    num_tokens = position = 0
    while position < len(content):
        if content.startswith(_IMAGE_MARKER_BYTES, position):
            num_placeholders = int.from_bytes(content[position + _IMAGE_RUN.size - 4 : position + _IMAGE_RUN.size], "little")
            num_tokens += num_placeholders
            position += _IMAGE_RUN.size
        else:
            num_tokens += 1
            position += _TOKEN_BYTES
    if position != len(content):
        raise ValueError("the content of a block ends within a token")
    return num_tokens
