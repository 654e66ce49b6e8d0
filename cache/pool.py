"""A pool of values bounded in bytes: the least recently used ones make room. Pure: what a value's bytes are is the caller's.

Pinned values are in use and stay. Called by the encoder for embeddings, and wherever else something bounded is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from triptych.shared.instance_info import PoolStats

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Entry(Generic[V]):
    value: V
    num_bytes: int
    num_pins: int = 0


class LruPool(Generic[K, V]):
    """on_evicted hears of each key that made room for another."""

    def __init__(self, capacity_bytes: int, on_evicted: Callable[[K], None] = lambda key: None) -> None:
        self._capacity_bytes = capacity_bytes
        self._on_evicted = on_evicted
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._num_bytes = 0
        self._num_pinned_bytes = 0
        self._num_hits = self._num_misses = self._num_stale = self._num_evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether it is here; that it was asked for counts nowhere."""
        return key in self._entries

    def put(self, key: K, value: V, num_bytes: int) -> bool:
        """Keep a value, unless its key is here already: then the older one stays. False: what is pinned leaves no room."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return True
        if num_bytes + self._num_pinned_bytes > self._capacity_bytes:
            return False
        self._make_room(num_bytes)
        self._entries[key] = _Entry(value, num_bytes)
        self._num_bytes += num_bytes
        return True

    def get(self, key: K, *, is_expected: bool = False) -> V | None:
        """The value, most recently used now. is_expected: somebody was told that it is here; else they are stale."""
        entry = self._entries.get(key)
        if entry is None:
            self._num_misses += 1
            self._num_stale += is_expected
            return None
        self._num_hits += 1
        self._entries.move_to_end(key)
        return entry.value

    def pin(self, key: K) -> None:
        """Keep a value that is here until as many calls of unpin. An entry that is unpinned was used until then."""
        entry = self._entries[key]
        if entry.num_pins == 0:
            self._num_pinned_bytes += entry.num_bytes
        entry.num_pins += 1

    def unpin(self, key: K) -> None:
        """Undo one pin."""
        entry = self._entries[key]
        assert entry.num_pins > 0, "unpinned more often than pinned"
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._num_pinned_bytes -= entry.num_bytes
            self._entries.move_to_end(key)

    def stats(self) -> PoolStats:
        """For the heartbeat: sizes now, counts since the start."""
        return PoolStats(
            num_bytes=self._num_bytes,
            capacity_bytes=self._capacity_bytes,
            num_entries=len(self._entries),
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_stale=self._num_stale,
            num_evicted=self._num_evicted,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when a count is wrong or the bound is broken."""
        entries = self._entries.values()
        assert self._num_bytes == sum(entry.num_bytes for entry in entries) <= self._capacity_bytes, "wrong number of bytes"
        assert self._num_pinned_bytes == sum(entry.num_bytes for entry in entries if entry.num_pins), "wrong pinned bytes"
        assert all(entry.num_pins >= 0 for entry in entries), "unpinned more often than pinned"

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self._capacity_bytes:
            key, entry = next(iter(self._entries.items()))
            if entry.num_pins:  # in use is recently used; others stand behind it, since there is room for num_bytes
                self._entries.move_to_end(key)
                continue
            del self._entries[key]
            self._num_bytes -= entry.num_bytes
            self._num_evicted += 1
            self._on_evicted(key)
