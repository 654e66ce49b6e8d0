"""BlockPool against a model of plain dictionaries, under random operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.shared.engine.paged_kv import BlockPool, Holder
from triptych.shared.errors import InternalError, Overloaded

NUM_BLOCKS = 12
HOLDERS: tuple[Holder, ...] = ("use", "lease", "cache")


class PoolMachine(RuleBasedStateMachine):
    """holds: how often each (block, holder) is held, as the pool should have it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: Counter[tuple[int, Holder]] = Counter()

    def held_blocks(self) -> set[int]:
        return {block_id for (block_id, _), count in self.holds.items() if count > 0}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        num_free = NUM_BLOCKS - len(self.held_blocks())
        if count > num_free:
            with pytest.raises(Overloaded):
                self.pool.allocate(count)
            return
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert not set(block_ids) & self.held_blocks()
        self.holds.update((block_id, "use") for block_id in block_ids)

    @precondition(lambda self: self.held_blocks())
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def add_ref(self, data: st.DataObject, holder: Holder) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.held_blocks())))
        self.pool.add_ref([block_id], holder)
        self.holds[block_id, holder] += 1

    @precondition(lambda self: self.held_blocks())
    @rule(data=st.data(), new_holder=st.sampled_from(HOLDERS))
    def move(self, data: st.DataObject, new_holder: Holder) -> None:
        block_id, source = data.draw(st.sampled_from(sorted(+self.holds)))
        self.pool.move([block_id], source, new_holder)
        self.holds[block_id, source] -= 1
        self.holds[block_id, new_holder] += 1

    @precondition(lambda self: self.held_blocks())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id, holder = data.draw(st.sampled_from(sorted(+self.holds)))
        self.pool.free([block_id], holder)
        self.holds[block_id, holder] -= 1

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), holder=st.sampled_from(HOLDERS))
    def wrong_free(self, block_id: int, holder: Holder) -> None:
        if self.holds[block_id, holder] == 0:
            with pytest.raises(InternalError):
                self.pool.free([block_id], holder)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_leased + pool.num_used == NUM_BLOCKS
        assert pool.num_free == NUM_BLOCKS - len(self.held_blocks())
        assert pool.num_used == len({b for (b, holder), n in self.holds.items() if holder == "use" and n})


PoolMachine.TestCase.settings = settings(stateful_step_count=30)
TestPool = PoolMachine.TestCase


def test_blocks_move_from_sequence_to_lease_and_back() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(3)
    pool.move(block_ids, "use", "lease")
    assert (pool.num_used, pool.num_leased, pool.num_free) == (0, 3, 1)
    pool.move(block_ids[:1], "lease", "use")
    assert (pool.num_used, pool.num_leased, pool.num_free) == (1, 2, 1)
    pool.free(block_ids[:1])
    pool.free(block_ids[1:], "lease")
    assert pool.num_free == 4


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(InternalError):
        BlockPool(2).add_ref([0])


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(Overloaded) as refused:
        pool.allocate(3)
    assert refused.value.code == "kv_full"
    assert pool.num_free == 2


def test_integrity_check_sees_a_corrupted_pool() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._free.append(pool._free[0])
    with pytest.raises(InternalError):
        pool.check_integrity()
