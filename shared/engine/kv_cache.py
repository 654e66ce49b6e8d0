"""The KV tensors of one engine: written by token, gathered by sequence, exported and imported whole blocks at a time.

A block holds each head's tokens together, so that what is gathered of a sequence lies as attention reads it: head by head.
Shapes: L layers, NB blocks, K kv heads, BS tokens of a block, H head size; T tokens, B sequences, S tokens of context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from triptych.shared.errors import InternalError


class Context(Protocol):
    """The KV that tokens of a batch attend to."""

    def read(self, layer: int, kv_B2KH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [B, K, S, H] each, of one layer after another. kv_B2KH: what was just written of each sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """Implements Context. index: int64 [2 * B * K * blocks of a sequence], which heads of which blocks stand in `target`, of
    which keys and values are views."""

    kv: KvCache
    index: torch.Tensor
    target: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def read(self, layer: int, kv_B2KH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.kv.gather(layer, self.index, self.target)
        return self.keys, self.values


class KvCache:
    """Zeros at first: masked tokens are still multiplied, and a NaN there would spread.

    state: how many batches asked for the places of their tokens, and what stands for the last import; kv_mirror.py compares.

    Args:
        shape: (L, NB, 2, K, BS, H).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.num_layers, _, _, self._num_kv_heads, self.block_size, self.head_size = shape
        self._heads_of_block = 2 * self._num_kv_heads
        self._blocks = _zeros(shape, dtype, device)
        self._tokens = self._blocks.view(shape[0], -1, self.head_size).unbind()  # L times [NB * 2K * BS, H]
        block_heads = self._blocks.view(shape[0], -1, self.block_size * self.head_size)
        self._block_heads = block_heads.unbind()  # L times [NB * 2K, BS * H]
        head_2K = torch.arange(self._heads_of_block, device=device)
        self._row_of_head_2K = head_2K * self.block_size
        self._head_21K1 = head_2K.view(2, 1, -1, 1)
        self._workspace = self.new_workspace(0)
        self._num_batches = 0
        self._last_import = object()

    @property
    def token_bytes(self) -> int:
        """What a token takes in one layer."""
        return self._heads_of_block * self.head_size * self.dtype.itemsize

    @property
    def state(self) -> tuple[int, object]:
        return self._num_batches, self._last_import

    def places(self, spans: Iterable[tuple[Seq[int], int, int]]) -> torch.Tensor:
        """Where `write` puts tokens, int64 [T, 2K]. spans: a sequence's blocks, and which of its tokens: [start, end)."""
        self._num_batches += 1
        size, block_rows = self.block_size, self._heads_of_block * self.block_size
        first_rows = [table[i // size] * block_rows + i % size for table, start, end in spans for i in range(start, end)]
        return torch.tensor(first_rows, device=self.device)[:, None] + self._row_of_head_2K

    def write(self, layer: int, places_T2K: torch.Tensor, kv_T2KH: torch.Tensor) -> None:
        """kv_T2KH: each token's keys, then its values."""
        self._tokens[layer].index_put_((places_T2K,), kv_T2KH)

    def context(self, block_ids: Seq[Seq[int]], num_tokens: int) -> Gathered:
        """The first num_tokens tokens of sequences with as many blocks each. It is valid until the next one is read: both
        lie in a workspace, since fresh memory of this size comes from the system and costs a page fault per 4 KB (measured:
        3 to 10 times the copy itself)."""
        index = self.index_of(block_ids)
        if len(index) > len(self._workspace):
            self._workspace = self.new_workspace(len(index))
        target = self._workspace[: len(index)]
        keys, values = target.view(2, len(block_ids), self._num_kv_heads, -1, self.head_size)[:, :, :, :num_tokens]
        return Gathered(self, index, target, keys, values)

    def index_of(self, block_ids: Seq[Seq[int]]) -> torch.Tensor:
        """For `gather`: all keys of these sequences, head by head, then their values."""
        blocks_1B1N = torch.tensor(block_ids, device=self.device)[None, :, None, :]
        return (blocks_1B1N * self._heads_of_block + self._head_21K1).flatten()

    def new_workspace(self, num_rows: int) -> torch.Tensor:
        """What `gather` fills num_rows rows of, and room for growth."""
        return self._block_heads[0].new_empty(num_rows + num_rows // 4, self.block_size * self.head_size)

    def gather(self, layer: int, index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self._block_heads[layer], 0, index, out=out)

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
        self._last_import = object()
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
