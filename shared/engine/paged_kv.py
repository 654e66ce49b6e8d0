"""Bookkeeping of KV blocks: who holds which, how often. Pure; the tensors are the engine's.

A block is held by running sequences ("use"), by leases of the transport ("lease"), by the prefix cache ("cache"), any
number of times each. It counts as the first of these that holds it, and is free when nobody does:
free + cached + leased + used == total. Not thread-safe: one thread (the event loop) calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from triptych.shared.errors import InternalError, Overloaded

Holder = Literal["use", "lease", "cache"]
_HOLDERS: tuple[Holder, ...] = ("use", "lease", "cache")  # a block counts as the first that holds it


class BlockPool:
    """Reference counts of the blocks [0, num_blocks).

    Args:
        num_blocks: how many blocks the engine's KV tensors have.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_cnt: dict[Holder, list[int]] = {holder: [0] * num_blocks for holder in _HOLDERS}
        self._num_held: dict[Holder, int] = dict.fromkeys(_HOLDERS, 0)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is used first, being warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_held["use"]

    @property
    def num_leased(self) -> int:
        """Blocks held by leases and not by a sequence."""
        return self._num_held["lease"]

    @property
    def num_cached(self) -> int:
        """Blocks held by the prefix cache alone."""
        return self._num_held["cache"]

    def is_only_cached(self, block_id: int) -> bool:
        """The prefix cache alone holds this block."""
        return self._holder_of(block_id) == "cache"

    def num_holds(self, block_id: int) -> int:
        """How many sequences and leases hold this block."""
        return self._ref_cnt["use"][block_id] + self._ref_cnt["lease"][block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take that many free blocks, each held once by "use".

        Raises:
            Overloaded: fewer are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise Overloaded(f"{num_blocks} KV blocks are needed and {len(self._free)} are free", code="kv_full")
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_cnt["use"][block_id] = 1
        self._num_held["use"] += num_blocks
        return block_ids

    def add_ref(self, block_ids: Iterable[int], holder: Holder = "use") -> None:
        """Hold blocks that somebody holds already once more.

        Raises:
            InternalError: a block is free.
        """
        for block_id in block_ids:
            before = self._holder_of(block_id)
            if before is None:
                raise InternalError(f"KV block {block_id} is free and cannot be shared")
            self._ref_cnt[holder][block_id] += 1
            self._recount(block_id, before)

    def free(self, block_ids: Iterable[int], holder: Holder = "use") -> None:
        """Give up one hold of each; a block that nobody holds any more is free.

        Raises:
            InternalError: a block isn't held that way.
        """
        for block_id in block_ids:
            if self._ref_cnt[holder][block_id] == 0:
                raise InternalError(f"KV block {block_id} is freed by a {holder} that does not hold it")
            before = self._holder_of(block_id)
            self._ref_cnt[holder][block_id] -= 1
            self._recount(block_id, before)

    def move(self, block_ids: Sequence[int], source: Holder, target: Holder) -> None:
        """Turn one hold of each into another kind: "use" -> "lease" when prefill has finished, back when decode on the same
        instance takes the blocks over."""
        self.add_ref(block_ids, target)
        self.free(block_ids, source)

    def check_integrity(self) -> None:
        """Compare all counts with each other; for tests and idle moments, linear in the number of blocks.

        Raises:
            InternalError: they disagree.
        """
        counts = [self._ref_cnt[holder] for holder in _HOLDERS]
        holder_of = ["use" if u else "lease" if v else "cache" if w else None for u, v, w in zip(*counts, strict=True)]
        counted = Counter(holder_of)
        free = set(self._free)
        if len(free) != len(self._free) or any(holder_of[block_id] is not None for block_id in free):
            raise InternalError("the list of free KV blocks has a block twice, or one that is held")
        if counted[None] != len(free) or any(counted[holder] != self._num_held[holder] for holder in _HOLDERS):
            raise InternalError(f"KV block counts disagree: {counted} counted, {self._num_held} and {len(free)} free kept")
        if any(min(count) < 0 for count in counts):
            raise InternalError("a KV block has a negative reference count")

    def _holder_of(self, block_id: int) -> Holder | None:
        for holder in _HOLDERS:  # a generator takes three times as long, and blocks change hands all the time
            if self._ref_cnt[holder][block_id] > 0:
                return holder
        return None

    def _recount(self, block_id: int, before: Holder | None) -> None:
        """Follow a change of a block's references in the totals and the free list."""
        after = self._holder_of(block_id)
        if after == before:
            return
        if before is not None:
            self._num_held[before] -= 1
        if after is None:
            self._free.append(block_id)
        else:
            self._num_held[after] += 1
