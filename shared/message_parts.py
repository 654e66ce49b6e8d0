"""Names and references that messages are made of. Import them from messages.py."""

from __future__ import annotations

from typing import NewType

import msgspec

from triptych.shared.image_info import ImageInfo

InstanceId = NewType("InstanceId", str)  # one life of one process, `encoder-0-5f3a2c1b`: slot name and incarnation
RequestId = NewType("RequestId", str)
TensorId = NewType("TensorId", str)

MAX_INLINE_TOKENS = 12_000  # chosen: 4 bytes each, leaves 16 KB for the rest of a message; a longer prompt is a TensorRef


class TensorRef(msgspec.Struct, frozen=True):
    """A tensor leased in its owner's store, to be pulled over the transport.
    shape and dtype (`uint8`, `float32`, `bfloat16`, ...) describe the contiguous tensor; num_bytes is its exact size.
    The owner may drop it lease_s seconds after it was stored, or when its request is released.
    offset: where it lies in the owner's arena while it is leased; None when it is only put there for a PullRequest.
    """

    tensor_id: TensorId
    owner: InstanceId
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    lease_s: float
    offset: int | None = None


class PlacedImage(msgspec.Struct, frozen=True):
    """An image's place in the unified sequence: its num_tokens placeholders start at `offset`. embeddings None: its KV should
    be cached where the prompt goes, or, when is_awaited, they come later with EmbeddingsReady. An image that several encoders
    divide among themselves is placed in parts, one after another."""

    image: ImageInfo
    offset: int
    embeddings: TensorRef | None = None
    is_awaited: bool = False


class PromptTokens(msgspec.Struct, frozen=True):
    """The unified sequence (placeholders expanded) as little-endian uint32: inline, or leased when longer than
    MAX_INLINE_TOKENS (a uint8 tensor of 4 * num_tokens bytes)."""

    num_tokens: int
    inline: bytes = b""
    leased: TensorRef | None = None


class KvRef(msgspec.Struct, frozen=True):
    """A request's KV blocks, leased by who computed them last. `tensor` has shape [num_layers, 2, num_blocks, block_size,
    num_kv_heads, head_dim]; the first num_computed_tokens slots are valid. `layout` must equal the puller's own.
    position_delta is added to a token's index to get its rotary position (multimodal rotary positions run behind).
    block_keys: what the first block's digest is a digest of and those of the full blocks, one after another, and key_tail: what
    the unfinished block holds (cache/block_keys.py); both empty when there are too many for a message, or nothing is
    cached: then the blocks are not cached where they go either."""

    tensor: TensorRef
    num_computed_tokens: int
    block_size: int
    position_delta: int
    layout: str
    block_keys: bytes = b""
    key_tail: bytes = b""


class PrefixSource(msgspec.Struct, frozen=True):
    """Who is thought to hold the KV of the first num_blocks blocks of a prompt, when it is worth pulling from there."""

    instance_id: InstanceId
    num_blocks: int
