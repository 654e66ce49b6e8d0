"""The KV tensors of one engine: written by token, gathered by sequence, exported and imported whole blocks at a time.

A block holds each head's tokens together, so that what is gathered of a sequence lies as attention reads it: head by head.
Shapes: L layers, NB blocks, K kv heads, BS tokens of a block, H head size; T tokens, B sequences, S tokens of context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from triptych.shared.errors import InternalError


@dataclass(frozen=True, slots=True)
class Context:
    """The KV of B sequences, as `KvCache.gather` fills it in for one layer after another. keys, values: [B, K, S, H].
    index: int64 [2 * B * K * blocks of a sequence], which heads of which blocks stand in `target`."""

    index: torch.Tensor
    target: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class KvCache:
    """Zeros at first: masked tokens are still multiplied, and a NaN there would spread.

    rows: of each layer all heads' tokens as they lie in memory: of a block all keys, head by head, then all values.

    Args:
        shape: (L, NB, 2, K, BS, H).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        _, _, _, self.num_kv_heads, self.block_size, head_size = shape
        self._heads_of_block = 2 * self.num_kv_heads
        self._blocks = _zeros(shape, dtype, device)
        self.rows = self._blocks.view(shape[0], -1, head_size).unbind()  # L times [NB * 2K * BS, H]
        self._block_heads = self._blocks.view(shape[0], -1, self.block_size * head_size).unbind()  # L times [NB * 2K, BS * H]
        head_2K = torch.arange(self._heads_of_block, device=device)
        self._row_of_head_2K = head_2K * self.block_size
        self._head_21K1 = head_2K.view(2, 1, -1, 1)
        self._workspace = self._block_heads[0].new_empty(0, self.block_size * head_size)

    def places(self, spans: Iterable[tuple[Seq[int], int, int]]) -> torch.Tensor:
        """Where `write` puts tokens, int64 [T, 2K]. spans: a sequence's blocks, and which of its tokens: [start, end)."""
        size, block_rows = self.block_size, self._heads_of_block * self.block_size
        first_rows = [table[i // size] * block_rows + i % size for table, start, end in spans for i in range(start, end)]
        return torch.tensor(first_rows, device=self.device)[:, None] + self._row_of_head_2K

    def write(self, layer: int, places_T2K: torch.Tensor, kv_T2KH: torch.Tensor) -> None:
        """kv_T2KH: each token's keys, then its values."""
        self.rows[layer].index_put_((places_T2K,), kv_T2KH)

    def context(self, tables: Seq[list[int]], num_tokens: int) -> Context:
        """The first num_tokens tokens of the sequences with these blocks. It is valid until the next one is filled: both lie
        in a workspace, since fresh memory of this size comes from the system and costs a page fault per 4 KB (measured: 3 to
        10 times the copy itself)."""
        index = (self._blocks_BX(tables, num_tokens)[None, :, None] * self._heads_of_block + self._head_21K1).flatten()
        if len(index) > len(self._workspace):
            self._workspace = self._workspace.new_empty(len(index) + len(index) // 4, self._workspace.shape[1])
        target = self._workspace[: len(index)]
        keys, values = target.view(2, len(tables), self.num_kv_heads, -1, self.shape[-1])[:, :, :, :num_tokens]
        return Context(index, target, keys, values)

    def gather(self, layer: int, context: Context) -> None:
        torch.index_select(self._block_heads[layer], 0, context.index, out=context.target)

    def first_rows(self, tables: Seq[list[int]], num_tokens: int) -> torch.Tensor:
        """int64 [B, num_tokens]: in which row the first head's key of each token stands."""
        blocks_BX = self._blocks_BX(tables, num_tokens)
        rows_BXS = blocks_BX[:, :, None] * (self._heads_of_block * self.block_size) + torch.arange(self.block_size)
        return rows_BXS.flatten(1)[:, :num_tokens]

    def _blocks_BX(self, tables: Seq[list[int]], num_tokens: int) -> torch.Tensor:
        """As many blocks of each sequence as num_tokens tokens take. Those that it lacks are blocks of its own: a masked NaN
        still spreads, and must not come from another request."""
        num_blocks = -(-num_tokens // self.block_size)
        padded = [(table + table[-1:] * (num_blocks - len(table)))[:num_blocks] for table in tables]
        return torch.tensor(padded, device=self.device)

    def exported_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (self.shape[0], num_blocks, *self.shape[2:])

    def export(self, block_ids: Seq[int], out: torch.Tensor | None) -> torch.Tensor:
        """A copy [L, len(block_ids), 2, K, BS, H], into `out` when given (any device).

        Raises:
            InternalError: `out` has another shape or dtype.
        """
        shape = self.exported_shape(len(block_ids))
        if out is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
        elif tuple(out.shape) != shape or out.dtype != self.dtype:
            raise InternalError(f"KV export of {self.dtype} {shape} into {out.dtype} {tuple(out.shape)}")
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        if out.device == self.device and out.is_contiguous():
            torch.index_select(self._blocks, 1, index, out=out)
        else:
            out.copy_(self._blocks.index_select(1, index))
        return out

    def import_(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        """Write what `export` gave.

        Raises:
            InternalError: it has another shape or dtype than this cache would export.
        """
        shape = self.exported_shape(len(block_ids))
        if tuple(blocks.shape) != shape or blocks.dtype != self.dtype:
            raise InternalError(f"KV import of {blocks.dtype} {tuple(blocks.shape)} where {self.dtype} {shape} fits")
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        self._blocks.index_copy_(1, index, blocks.to(self.device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, and on the CPU ones that take no memory until they are written: torch.zeros touches every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
