"""What the KV blocks of one instance hold, so that a prompt which begins like an earlier one is not computed again.

Blocks are kept by their keys (block_keys.py) once they are full, until others are wanted (KvBlocks.allocate). Whoever holds a
kept block holds all those before it: `add` sees to that. So what the cache alone holds is never followed by a block that is
in use, and all of it can be evicted, last blocks first. Belongs to the instance, whatever its roles are. Event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from triptych.cache.block_keys import BlockChain, ImagePlace, prompt_chain, root_key, unpack_keys
from triptych.cache.index import CacheIndex
from triptych.cache.prefix_tree import PrefixTree
from triptych.shared.engine.api import Engine, Sequence
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import PoolStats
from triptych.shared.messages import BlocksReply, BlocksRequest, InstanceId, KvRef


class PrefixCache:
    """is_on: else nothing is kept. The index is told of all that comes and goes.

    num_hits, num_misses, num_stale (others asked for them, see PoolStats), num_evicted: blocks.
    """

    def __init__(self, engine: Engine, kv: KvBlocks, index: CacheIndex, holder: InstanceId, is_on: bool) -> None:
        self._engine = engine
        self._kv = kv
        self._index = index
        self._holder = holder
        self._is_on = is_on
        self._tree = PrefixTree()
        self.num_hits = self.num_misses = self.num_stale = self.num_evicted = 0
        kv.evict_with(self._evict)

    def chain_of(self, token_ids: Seq[int], places: Seq[ImagePlace], cache_salt: bytes) -> BlockChain | None:
        """The keys of a prompt; None when nothing is kept.

        Raises:
            InternalError: its images' places or hashes are impossible.
        """
        if not self._is_on:
            return None
        engine = self._engine
        image_set = [place.mm_hash for place in places] if engine.attends_to_all else []
        root = root_key(engine.model_card.revision, engine.block_size, cache_salt, image_set)
        try:
            return prompt_chain(token_ids, places, engine.block_size, root)
        except ValueError as error:
            raise InternalError(f"the prompt has no block keys: {error}", code="invalid_message") from None

    def chain_from(self, kv: KvRef) -> BlockChain | None:
        """The keys of a prompt that was computed elsewhere; None when nothing is kept, or they were not sent.

        Raises:
            InternalError: they are not those of so many tokens.
        """
        if not self._is_on or not kv.block_keys:
            return None
        try:
            chain = BlockChain.resume(kv.block_keys, kv.key_tail, kv.block_size)
        except ValueError as error:
            raise InternalError(f"the prompt's block keys are none: {error}", code="invalid_message") from None
        if chain.num_tokens != kv.num_computed_tokens:
            raise InternalError("the prompt's block keys are of another number of tokens", code="invalid_message")
        return chain

    def num_held(self, keys: Seq[bytes]) -> int:
        """How many of these blocks, from the first on, are here; they are the last to be evicted now."""
        return len(self._tree.match(keys))

    def take(self, keys: Seq[bytes]) -> list[int]:
        """The longest prefix of these blocks that is here, held once more."""
        block_ids = self._tree.match(keys)
        self._kv.pool.add_ref(block_ids)
        return block_ids

    def give_back(self, block_ids: Seq[int]) -> None:
        """After a `take` that came to nothing. Tells nobody: nothing has changed."""
        self._kv.pool.free(block_ids)

    def note(self, keys: Seq[bytes], num_hits: int) -> None:
        """A prompt whose blocks could be here begins with num_hits that are, or were pulled from a peer. The index is told
        again of those that are here, since they are wanted; of the others once they are kept, which they may never be."""
        self.num_hits += num_hits
        self.num_misses += len(keys) - num_hits
        self._index.hold(self._holder, "kv", keys[: self.num_held(keys[:num_hits])])

    def note_stale(self, keys: Seq[bytes]) -> None:
        """Somebody was told that all of these are here: those that are not shall be forgotten."""
        gone = keys[self.num_held(keys) :]
        if gone:
            self.num_stale += len(gone)
            self._index.drop(self._holder, "kv", gone)

    def catch_up(self, sequence: Sequence, keys: Seq[bytes]) -> int:
        """Where others have computed more of a prompt than its own sequence, it goes on with their blocks; how many tokens it
        need not compute."""
        kept, block_size = self._tree.match(keys), self._engine.block_size
        num_gained = len(kept) * block_size - sequence.num_computed_tokens
        if num_gained <= 0:
            return 0
        self._go_on_with(sequence, kept)
        sequence.num_computed_tokens += num_gained
        self.num_hits += num_gained // block_size
        self.num_misses -= num_gained // block_size
        return num_gained

    def add(self, sequence: Sequence, keys: Seq[bytes]) -> None:
        """Keep what a sequence has computed, up to its last full block. keys: of its blocks. Where a block with the same key is
        here already the sequence goes on with that one, and gives its own back."""
        keys = keys[: sequence.num_computed_tokens // self._engine.block_size]
        offered = sequence.block_table[: len(keys)]
        taken = self._tree.insert(keys, offered)
        self._kv.pool.add_ref([offered[i] for i in taken], "cache")
        if taken:
            self._index.hold(self._holder, "kv", [keys[i] for i in taken])
        if len(taken) < len(keys):
            self._go_on_with(sequence, self._tree.match(keys))

    async def lease(self, request: BlocksRequest) -> BlocksReply:
        """Lease a peer the blocks that it asks for, as far as they are here and decode work here can do without them.

        Raises:
            InternalError: the keys are none.
            Overloaded: too many leases.
        """
        try:
            keys = unpack_keys(request.block_keys)
        except ValueError as error:
            raise InternalError(f"{error}", code="invalid_message") from None
        block_ids = self._tree.match(keys)
        self.note_stale(keys)
        layout = self._engine.kv_layout
        pool = self._kv.pool
        num_pinned = sum(pool.is_only_cached(block_id) for block_id in block_ids)
        if len(block_ids) <= request.num_held or self._kv.num_available - num_pinned < self._kv.num_claimed:
            return BlocksReply(0, layout)
        ref = await self._kv.lease_prefix(block_ids, request.num_held, request.request_id, request.timeout_s)
        return BlocksReply(len(block_ids) - request.num_held, layout, ref)

    def stats(self) -> PoolStats:
        """For the heartbeat."""
        shape, dtype = self._engine.exported_shape(1)
        block_bytes = dtype.itemsize * math.prod(shape)
        return PoolStats(
            num_bytes=len(self._tree) * block_bytes,
            capacity_bytes=self._kv.num_total * block_bytes,
            num_entries=len(self._tree),
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_stale=self.num_stale,
            num_evicted=self.num_evicted,
        )

    def __len__(self) -> int:
        return len(self._tree)

    def check_integrity(self) -> None:
        """Raises AssertionError when the tree is broken."""
        self._tree.check_integrity()

    def _go_on_with(self, sequence: Sequence, kept: Seq[int]) -> None:
        own = sequence.block_table
        self._kv.exchange(sequence, {i: block_id for i, block_id in enumerate(kept) if own[i] != block_id})

    def _evict(self, num_blocks: int) -> None:
        pool = self._kv.pool
        evicted = self._tree.evict(num_blocks, pool.is_only_cached)
        pool.free([block_id for _, block_id in evicted], "cache")
        self.num_evicted += len(evicted)
        assert len(evicted) == num_blocks, "a block that only the cache holds is followed by one in use"
        self._index.drop(self._holder, "kv", [key for key, _ in evicted])
