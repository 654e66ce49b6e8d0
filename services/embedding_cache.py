"""The embeddings that one instance has of images, or of parts of such, so that what was seen before is not encoded again.

They are kept as the vision tower made them, and leased without a copy: one is made when somebody pulls. What is leased is
pinned. Belongs to the instance, whatever its roles are. Event loop only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.cache.held_parts import holder_of
from triptych.cache.index import CacheIndex
from triptych.cache.pool import LruPool
from triptych.shared.image_info import ImageInfo, PartKey
from triptych.shared.instance_info import PoolStats
from triptych.shared.messages import InstanceId, RequestId, TensorRef
from triptych.shared.transport.api import Transport

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


class EmbeddingCache:
    """The index is told of all that comes and goes.

    Args:
        capacity_bytes: 0: nothing is kept.
    """

    def __init__(self, transport: Transport, index: CacheIndex, holder: InstanceId, capacity_bytes: int) -> None:
        self._transport = transport
        self._index = index
        self._holder = holder
        self._pool: LruPool[PartKey, torch.Tensor] = LruPool(capacity_bytes, self._tell_dropped)
        self.is_on = capacity_bytes > 0

    def find(self, image: ImageInfo, is_expected: bool = False) -> torch.Tensor | None:
        """An image's embeddings, not to be written. is_expected: somebody was told that they are here."""
        embeddings = self._pool.get(image.key, is_expected=is_expected)
        if embeddings is not None and embeddings.shape[0] != image.num_tokens:
            return None
        if embeddings is not None:  # wanted, so that the index shall not forget
            self._tell_held(image.key)
        elif is_expected:  # it shall, at last
            self._tell_dropped(image.key)
        return embeddings

    def add(self, image: ImageInfo, embeddings: torch.Tensor) -> None:
        """Keep them, where there is room beside what is in use."""
        if self._pool.put(image.key, embeddings, embeddings.nbytes):
            self._tell_held(image.key)

    async def lease(self, image: ImageInfo, embeddings: torch.Tensor, request_id: RequestId, lease_s: float) -> TensorRef:
        """Lease an image's embeddings, whether they are kept or not.

        Raises:
            Overloaded: what is not kept must be copied at once, and the tensor store is full.
        """
        key = image.key
        if key not in self._pool:
            return await self._transport.put(embeddings, request_id, lease_s)
        self._pool.pin(key)
        try:
            return await self._transport.put_kept(embeddings, request_id, lease_s, lambda: self._pool.unpin(key))
        except BaseException:  # also cancellation: nobody will ever hold a reference to the lease
            self._pool.unpin(key)
            raise

    def stats(self) -> PoolStats:
        """For the heartbeat."""
        return self._pool.stats()

    def check_integrity(self) -> None:
        """Raises AssertionError when the pool's counts are wrong."""
        self._pool.check_integrity()

    def _tell_held(self, key: PartKey) -> None:
        self._index.hold(holder_of(self._holder, key), "embeddings", [key[0]])

    def _tell_dropped(self, key: PartKey) -> None:
        self._index.drop(holder_of(self._holder, key), "embeddings", [key[0]])
