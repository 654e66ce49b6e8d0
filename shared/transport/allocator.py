"""First-fit allocation of ranges in a fixed space of bytes: pure bookkeeping, no memory. Used by the arena.

0        64            320      384                 capacity
| used   | free        | used   | free                 |      free ranges are sorted and never touch: they coalesce
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGN_BYTES = 64  # chosen: a cache line, and enough for every dtype


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to the alignment; at least one unit, so that every range has an offset of its own."""
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


class FirstFit:
    """Ranges of `capacity_bytes` bytes, all aligned to ALIGN_BYTES.

    First fit by offset keeps a lightly used store in the few pages that are already warm.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.used_bytes = 0
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []  # offset, size
        self._used: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a free range of at least num_bytes, or None when no free range is long enough."""
        size = aligned(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(offset + size, length - size)] if length > size else []
                self._used[offset] = size
                self.used_bytes += size
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give back a range.

        Raises:
            KeyError: nothing is allocated there (our bug).
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        index = bisect_left(self._free, (offset, 0))
        end = offset + size
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            offset = self._free.pop(index - 1)[0]
        insort(self._free, (offset, end - offset))

    @property
    def num_ranges(self) -> int:
        """Ranges allocated."""
        return len(self._used)

    def check_integrity(self) -> None:
        """free + used == capacity, no overlap, no gap, neighbours coalesced.

        Raises:
            AssertionError: with what is wrong.
        """
        ranges = sorted([(offset, size, True) for offset, size in self._used.items()] + [(*item, False) for item in self._free])
        end, was_free = 0, False
        for offset, size, is_used in ranges:
            if offset != end or size <= 0 or offset % ALIGN_BYTES:
                raise AssertionError(f"range {offset}+{size} follows {end}")
            if was_free and not is_used:
                raise AssertionError(f"free ranges touch at {offset}")
            end, was_free = offset + size, not is_used
        if end != self.capacity_bytes or sum(self._used.values()) != self.used_bytes:
            raise AssertionError(f"ranges end at {end} of {self.capacity_bytes}, {self.used_bytes} counted as used")
