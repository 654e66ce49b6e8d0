"""The prefix tree against plain dictionaries: whatever is inserted, matched, in use and evicted, in whatever order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.cache.prefix_tree import PrefixTree

PATHS = st.text("ab", min_size=1, max_size=5)


def keys_of(path: str) -> list[bytes]:
    """As block keys are: each tells all that comes before it."""
    return [path[: end + 1].encode() for end in range(len(path))]


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.block_ids: dict[bytes, int] = {}
        self.used_at: dict[bytes, int] = {}
        self.in_use: set[bytes] = set()
        self.new_ids = itertools.count()
        self.clock = itertools.count()

    def touch(self, keys: Sequence[bytes]) -> None:
        now = next(self.clock)
        self.used_at |= dict.fromkeys(keys, now)

    def held_prefix(self, path: str) -> list[bytes]:
        return list(itertools.takewhile(self.block_ids.__contains__, keys_of(path)))

    @rule(path=PATHS)
    def insert(self, path: str) -> None:
        keys = keys_of(path)
        offered = [next(self.new_ids) for _ in keys]
        new = [index for index, key in enumerate(keys) if key not in self.block_ids]
        assert self.tree.insert(keys, offered) == new
        self.block_ids |= {keys[index]: offered[index] for index in new}
        self.touch(keys)

    @rule(path=PATHS)
    def match(self, path: str) -> None:
        held = self.held_prefix(path)
        assert self.tree.match(keys_of(path)) == [self.block_ids[key] for key in held]
        self.touch(held)

    @rule(path=PATHS)
    def use(self, path: str) -> None:
        self.in_use |= set(self.held_prefix(path)[-1:])

    @rule()
    def stop_using(self) -> None:
        """A sequence that ends offers its blocks once more; how often its path was touched before does not matter then."""
        for key in sorted(self.in_use):
            self.match(key.decode())
        self.in_use.clear()

    @rule(num_blocks=st.integers(0, 12))
    def evict(self, num_blocks: int) -> None:
        in_use = {self.block_ids[key] for key in self.in_use}
        protected = {key for key in self.block_ids if any(used.startswith(key) for used in self.in_use)}
        evicted = self.tree.evict(num_blocks, lambda block_id: block_id not in in_use)
        assert len(evicted) == min(num_blocks, len(self.block_ids) - len(protected))
        gone = dict(evicted)
        assert gone.keys().isdisjoint(protected)
        assert gone == {key: self.block_ids.pop(key) for key in gone}
        assert all(key[:-1] in self.block_ids for key in self.block_ids if len(key) > 1), "a block lost the one before it"
        could_have_gone = [self.used_at[key] for key in self.block_ids if key not in protected]
        assert max((self.used_at[key] for key in gone), default=0) <= min(could_have_gone, default=next(self.clock))

    @invariant()
    def is_sound(self) -> None:
        self.tree.check_integrity()
        assert len(self.tree) == len(self.block_ids)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_the_leaf_goes_before_what_it_depends_on() -> None:
    tree = PrefixTree()
    tree.insert(keys_of("abc"), [1, 2, 3])
    tree.insert(keys_of("x"), [4])
    assert tree.evict(3, lambda block_id: True) == [(b"abc", 3), (b"ab", 2), (b"a", 1)]


def test_what_is_used_stays_longest_and_takes_along_what_it_depends_on() -> None:
    tree = PrefixTree()
    tree.insert(keys_of("ab"), [1, 2])
    tree.insert(keys_of("xy"), [3, 4])
    assert tree.match(keys_of("abc")) == [1, 2]
    assert [block_id for _, block_id in tree.evict(9, lambda block_id: True)] == [4, 3, 2, 1]


def test_existing_blocks_stay() -> None:
    tree = PrefixTree()
    assert tree.insert(keys_of("ab"), [1, 2]) == [0, 1]
    assert tree.insert(keys_of("abc"), [7, 8, 9]) == [2]
    assert tree.match(keys_of("abc")) == [1, 2, 9]


@pytest.mark.parametrize("break_it", ["order", "count", "block id", "parent"])
def test_the_integrity_check_sees(break_it: str) -> None:
    tree = PrefixTree()
    tree.insert(keys_of("ab"), [1, 2])
    tree.insert(keys_of("ac"), [1, 3])
    tree.check_integrity()
    node = tree._nodes[b"ab"]
    if break_it == "order":
        tree._nodes.move_to_end(b"ab")
    elif break_it == "count":
        node.num_children += 1
    elif break_it == "block id":
        node.block_id = 3
    else:
        del tree._nodes[b"a"]
    with pytest.raises(AssertionError):
        tree.check_integrity()
