"""The KV of a group of decoding sequences in one piece, kept from step to step: a step adds a token to each row, where
gathering would copy whole contexts.

A mirror is of blocks, not of sequences: row b holds the first num_ctx[b] tokens of the blocks tables[b], whoever they belong
to. It is believed only by the batch right after its last one, when no import came in between, so nothing can have changed
behind it. Shapes: L layers, B sequences, K kv heads, C tokens of capacity, S tokens of context, H head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from triptych.shared.engine.kv_cache import KvCache

LEAST_BYTES = 1 << 20  # measured: what is gathered of a layer in less stays in a core's caches, and is as fast
MOST_BYTES = 256 << 20  # chosen: of all mirrors together
_MARGIN_TOKENS = 64  # chosen: steps until a mirror is filled anew


@dataclass(slots=True)
class Mirror:
    """Implements Context. storage: L times what a layer is laid out in. index: which heads of which blocks fill it, None when
    tokens are added to what is there; rows_B2K: where. layers: L times [2, B, K, C, H]."""

    kv: KvCache
    tables: list[list[int]]
    num_ctx: list[int]
    state: tuple[int, object]
    storage: list[torch.Tensor]
    layers: list[torch.Tensor]
    rows_B2K: torch.Tensor
    index: torch.Tensor | None

    def read(self, layer: int, kv_B2KH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mirrored = self.layers[layer]
        if self.index is not None:
            self.kv.gather(layer, self.index, mirrored.view(len(self.index), -1))
        else:
            mirrored.view(-1, mirrored.shape[-1]).index_put_((self.rows_B2K,), kv_B2KH)
        keys, values = mirrored[:, :, :, : self.num_ctx[0]]
        return keys, values

    def follow(self, tables: Seq[list[int]], num_ctx: list[int]) -> bool:
        """Whether this batch is the next one of the same group, each context longer by the token that `read` adds."""
        batch, last_import = self.kv.state
        is_next = (
            self.state == (batch - 1, last_import)
            and num_ctx == [before + 1 for before in self.num_ctx]
            and num_ctx[0] <= self.layers[0].shape[3]
            and all(table[: len(held)] == held for table, held in zip(tables, self.tables, strict=True))
        )
        if is_next:
            self.state, self.num_ctx, self.tables = (batch, last_import), num_ctx, _held(tables, num_ctx, self.kv)
            self.rows_B2K += 1
            self.index = None
        return is_next


class Mirrors:
    """Of the groups of a batch, by the place where each begins."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._mirrors: dict[int, Mirror] = {}

    def of_group(self, begin: int, tables: Seq[list[int]], num_ctx: list[int]) -> Mirror | None:
        """Longest context first; the batch's places have been asked for. None: the group is too small, or all are too large."""
        mirror = self._mirrors.get(begin)
        if mirror is None or not mirror.follow(tables, num_ctx):
            mirror = self._start(begin, tables, num_ctx)
        return mirror

    def _start(self, begin: int, tables: Seq[list[int]], num_ctx: list[int]) -> Mirror | None:
        kv = self._kv
        num_blocks = -(-(num_ctx[0] + _MARGIN_TOKENS) // kv.block_size)
        if len(tables) * num_ctx[0] * kv.token_bytes < LEAST_BYTES:
            return None
        before = self._mirrors.get(begin)
        self._mirrors = {place: mirror for place, mirror in self._mirrors.items() if place < begin}
        index = kv.index_of([padded(table, num_blocks) for table in tables])
        storage = before.storage if before is not None else []
        if not storage or len(storage[0]) < len(index):
            storage = [kv.new_workspace(len(index)) for _ in range(kv.num_layers)]
        if sum(layer.nbytes for layer in itertools.chain(storage, *(m.storage for m in self._mirrors.values()))) > MOST_BYTES:
            return None
        shape = (2, len(tables), -1, num_blocks * kv.block_size, kv.head_size)
        layers = [whole[: len(index)].view(shape) for whole in storage]
        head_B2K = torch.arange(len(index) // num_blocks).view(2, len(tables), -1).transpose(0, 1).flatten(1)
        rows_B2K = head_B2K * shape[3] + torch.tensor(num_ctx)[:, None] - 1
        mirror = Mirror(kv, _held(tables, num_ctx, kv), num_ctx, kv.state, storage, layers, rows_B2K, index)
        self._mirrors[begin] = mirror
        return mirror


def padded(table: list[int], num_blocks: int) -> list[int]:
    """With a block of its own: a masked NaN still spreads, and must not come from another request."""
    return (table + table[-1:] * (num_blocks - len(table)))[:num_blocks]


def _held(tables: Seq[list[int]], num_ctx: list[int], kv: KvCache) -> list[list[int]]:
    """Copies of the blocks that hold tokens: a table grows in place."""
    return [table[: -(-num // kv.block_size)] for table, num in zip(tables, num_ctx, strict=True)]
