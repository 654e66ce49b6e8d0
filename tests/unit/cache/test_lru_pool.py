"""The bounded pool against a plain dictionary: whatever is put, read, pinned, and in whatever order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.cache.pool import LruPool

CAPACITY_BYTES = 20
KEYS = st.sampled_from("abcdefgh")


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.pool: LruPool[str, object] = LruPool(CAPACITY_BYTES, self.gone.append)
        self.values: dict[str, object] = {}
        self.sizes: dict[str, int] = {}
        self.used_at: dict[str, int] = {}
        self.pins: list[str] = []
        self.clock = itertools.count()
        self.num_evicted = 0

    def _unpinned(self) -> set[str]:
        return self.values.keys() - set(self.pins)

    @rule(key=KEYS, num_bytes=st.integers(0, 25))
    def put(self, key: str, num_bytes: int) -> None:
        value = object()
        pinned_bytes = sum(self.sizes[pinned] for pinned in set(self.pins))
        fits = key in self.values or pinned_bytes + num_bytes <= CAPACITY_BYTES
        assert self.pool.put(key, value, num_bytes) == fits
        if not fits:
            assert not self.gone, "made room for what could not be kept"
            return
        self._forget_gone(num_bytes)
        self.used_at[key] = next(self.clock)
        if key not in self.values:
            self.values[key], self.sizes[key] = value, num_bytes

    def _forget_gone(self, num_bytes: int) -> None:
        assert set(self.gone) <= self._unpinned()
        latest_gone = max((self.used_at[key] for key in self.gone), default=-1)
        assert all(self.used_at[key] > latest_gone for key in self._unpinned() - set(self.gone)), "not the least recently used"
        if self.gone:
            last = self.gone[-1]
            room = CAPACITY_BYTES - sum(size for key, size in self.sizes.items() if key not in self.gone[:-1])
            assert room < num_bytes, f"{last} could have stayed"
        self.num_evicted += len(self.gone)
        for key in self.gone:
            del self.values[key], self.sizes[key]
        self.gone.clear()

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        assert self.pool.get(key) is self.values.get(key)
        assert (key in self.pool) == (key in self.values)
        if key in self.values:
            self.used_at[key] = next(self.clock)

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.values)))
        self.pool.pin(key)
        self.pins.append(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.pins))
        self.pool.unpin(key)
        self.pins.remove(key)
        if key not in self.pins:
            self.used_at[key] = next(self.clock)

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert (stats.num_entries, stats.num_bytes) == (len(self.values), sum(self.sizes.values()))
        assert stats.num_bytes <= stats.capacity_bytes == CAPACITY_BYTES
        assert stats.num_evicted == self.num_evicted


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_counts() -> None:
    pool: LruPool[str, int] = LruPool(10)
    pool.put("a", 1, 4)
    assert [pool.get("a"), pool.get("b"), pool.get("b", is_expected=True), pool.get("a", is_expected=True)] == [
        1,
        None,
        None,
        1,
    ]
    stats = pool.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_stale, stats.num_evicted) == (2, 2, 1, 0)


def test_a_pool_of_no_bytes_keeps_nothing() -> None:
    pool: LruPool[str, int] = LruPool(0)
    assert not pool.put("a", 1, 4)
    assert len(pool) == 0


@pytest.mark.parametrize("name", ["_num_bytes", "_num_pinned_bytes"])
def test_the_integrity_check_sees_wrong_counts(name: str) -> None:
    pool: LruPool[str, int] = LruPool(10)
    pool.put("a", 1, 4)
    pool.pin("a")
    pool.check_integrity()
    setattr(pool, name, 5)
    with pytest.raises(AssertionError):
        pool.check_integrity()
