"""Which KV blocks of one instance hold which prefixes. Pure: counting block ids, freeing and copying them is the caller's.

A block key commits to all that comes before it (block_keys.py), so the tree is a table of keys. It is kept in order of use with
each block behind its children: whoever touches a path touches its last block first. So the first of all is always the
least recently used leaf, and every operation takes constant time for each block that it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Node:
    key: bytes
    block_id: int
    parent: _Node | None
    num_children: int = 0


class PrefixTree:
    """Blocks by key; a block is only here while the one before it is. Each block id is here at most once."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix of `keys` that is here; they are the most recently used now."""
        path: list[_Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            path.append(node)
        for node in reversed(path):
            self._nodes.move_to_end(node.key)
        return [node.block_id for node in path]

    def insert(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[int]:
        """Add a path from the first block of its prompt on. Returns the indices of those newly taken: where a key was here
        already, the block that it had stays, and the caller keeps the one it offered."""
        taken = []
        parent: _Node | None = None
        for index, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(key, block_id, parent)
                if parent is not None:
                    parent.num_children += 1
                taken.append(index)
            parent = node
        for key in reversed(keys):
            self._nodes.move_to_end(key)
        return taken

    def evict(self, num_blocks: int, may_evict: Callable[[int], bool]) -> list[tuple[bytes, int]]:
        """Remove up to num_blocks blocks, least recently used leaves first; returns their keys and ids. A block that may_evict
        refuses is in use, which counts as touching it and what comes before it."""
        evicted: list[tuple[bytes, int]] = []
        first_refused: _Node | None = None
        while self._nodes and len(evicted) < num_blocks:
            leaf = next(iter(self._nodes.values()))
            if leaf is first_refused:  # all others have been asked for
                break
            if may_evict(leaf.block_id):
                self._remove(leaf)
                evicted.append((leaf.key, leaf.block_id))
            else:
                first_refused = first_refused or leaf
                self._touch_path(leaf)
        return evicted

    def check_integrity(self) -> None:
        """Raises AssertionError when a block stands before its child, a count is wrong, or a block id is here twice."""
        num_children: dict[bytes, int] = {}
        seen: set[bytes] = set()
        for key, node in self._nodes.items():
            assert node.key == key, "a block is filed under another key"
            assert node.num_children == num_children.get(key, 0), "a block stands before its child, or its count is wrong"
            if node.parent is not None:
                assert node.parent.key not in seen, "a block stands before its child"
                assert self._nodes.get(node.parent.key) is node.parent, "a block is here without the one before it"
                num_children[node.parent.key] = num_children.get(node.parent.key, 0) + 1
            seen.add(key)
        assert len({node.block_id for node in self._nodes.values()}) == len(self._nodes), "a block id is here twice"

    def _touch_path(self, node: _Node | None) -> None:
        while node is not None:
            self._nodes.move_to_end(node.key)
            node = node.parent

    def _remove(self, leaf: _Node) -> None:
        del self._nodes[leaf.key]
        if leaf.parent is not None:
            leaf.parent.num_children -= 1
