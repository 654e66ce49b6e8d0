"""The KV tensors of one engine: written by slot, gathered by block, exported and imported whole blocks at a time.

Shapes: L layers, NB blocks, BS slots of a block, K kv heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from triptych.shared.errors import InternalError


class KvCache:
    """Zeros at first: masked slots are still multiplied, and a NaN there would spread.

    Args:
        shape: (L, 2, NB, BS, K, H).
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.block_size = shape[3]
        self._blocks = _zeros(shape, dtype, device)
        slots = self._blocks.view(*shape[:2], -1, *shape[4:])  # [L, 2, NB * BS, K, H]
        rows = self._blocks.view(*shape[:3], -1)  # [L, 2, NB, BS * K * H]
        self._slots = [(layer[0], layer[1]) for layer in slots]
        self._rows = [(layer[0], layer[1]) for layer in rows]
        self._workspace = (rows.new_empty(0, rows.shape[-1]), rows.new_empty(0, rows.shape[-1]))

    def write(self, layer: int, slots_T: torch.Tensor, keys_TKH: torch.Tensor, values_TKH: torch.Tensor) -> None:
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, slots_T, keys_TKH)
        value_slots.index_copy_(0, slots_T, values_TKH)

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(block_ids) * BS, K, H] of some blocks, valid until the next call: they lie in a workspace,
        since fresh memory of this size comes from the system and costs a page fault per 4 KB (measured: 3 to 10 times the
        copy itself)."""
        num_blocks = len(block_ids)
        if num_blocks > len(self._workspace[0]):
            size = (num_blocks + num_blocks // 4, self._workspace[0].shape[1])
            self._workspace = (self._blocks.new_empty(size), self._blocks.new_empty(size))
        keys, values = self._workspace[0][:num_blocks], self._workspace[1][:num_blocks]
        torch.index_select(self._rows[layer][0], 0, block_ids, out=keys)
        torch.index_select(self._rows[layer][1], 0, block_ids, out=values)
        return keys.view(-1, *self.shape[4:]), values.view(-1, *self.shape[4:])

    def exported_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (*self.shape[:2], num_blocks, *self.shape[3:])

    def export(self, block_ids: Seq[int], out: torch.Tensor | None) -> torch.Tensor:
        """A copy [L, 2, len(block_ids), BS, K, H], into `out` when given (any device).

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
            torch.index_select(self._blocks, 2, index, out=out)
        else:
            out.copy_(self._blocks.index_select(2, index))
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
        self._blocks.index_copy_(2, index, blocks.to(self.device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, and on the CPU ones that take no memory until they are written: torch.zeros touches every page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).view(shape)
