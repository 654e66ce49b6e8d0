"""One picture of an attempt, and the parts in which it is encoded. State only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from triptych.services.router.data_url import ImageSource
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId, TensorRef
from triptych.shared.policies.sharding import Share


@dataclass(slots=True, eq=False)
class Tries:
    """at: where something went last; lost_at: where its tries ended. num_given_up: with a role, while the instance lives."""

    at: InstanceId | None = None
    lost_at: list[InstanceId] = field(default_factory=list)
    num_given_up: int = 0


@dataclass(slots=True, eq=False)
class Shard:
    """What one encoder encodes of a picture: mostly all of it.

    image: that part. share: who is to encode it, where the picture was divided by the policy.
    encoder_id, due_at_s: where and when its embeddings are expected. is_encoded: set when embeddings are there.
    """

    image: ImageInfo
    share: Share | None = None
    tries: Tries = field(default_factory=Tries)
    encoder_id: InstanceId | None = None
    due_at_s: float | None = None
    embeddings: TensorRef | None = None
    is_encoded: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def offset(self) -> int:
        """Of its first token in the picture."""
        return (self.image.first_piece or 0) * (self.image.num_tokens // self.image.num_pieces)


@dataclass(slots=True, eq=False)
class Picture:
    """One picture of an attempt.

    file_key: of one that was sent along. image: once it is known. pixels: once it is decoded; media_id, kept_at: where its file
    waits for that. is_new: it had to be decoded to be known. is_settled: set when it is clear whether its embeddings are
    needed; if not, is_left_out. shards: once it is clear how it is encoded. is_placed: set when all of them have an encoder.
    tries: to know it. decoding: held while its pixels are asked for.
    """

    index: int
    source: ImageSource
    file_key: bytes | None = None
    image: ImageInfo | None = None
    pixels: TensorRef | None = None
    media_id: str | None = None
    kept_at: InstanceId | None = None
    is_new: bool = False
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_left_out: bool = False
    shards: list[Shard] = field(default_factory=list)
    is_placed: asyncio.Event = field(default_factory=asyncio.Event)
    tries: Tries = field(default_factory=Tries)
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_divided(self) -> bool:
        return len(self.shards) > 1

    def in_parts(self) -> list[Shard]:
        """Its shards, or all of it where that is not clear yet. It is known."""
        assert self.image is not None
        return self.shards or [Shard(self.image)]

    def place(self, shard: Shard, encoder_id: InstanceId, due_at_s: float | None = None) -> None:
        """A shard has an encoder."""
        shard.encoder_id, shard.due_at_s = encoder_id, due_at_s
        if all(one.encoder_id is not None for one in self.shards):
            self.is_placed.set()
