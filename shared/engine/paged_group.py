"""Attention of single tokens straight from the KV blocks, on a CPU: nothing is gathered or padded, and kept between steps is
only where tokens stand.

Which rows of a layer are a head's keys is a sparse pattern, the same in all layers. Scores are the product of queries and rows
computed where the pattern says; the values stand a fixed number of rows behind their keys, so the same rows are then summed up
by their weights, as the embeddings of a bag. Numbers equal those of gathered attention but for rounding.
Shapes: B sequences of a group, N query heads, K kv heads, H head size, S tokens of context of one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from triptych.shared.engine.kv_cache import KvCache

MAX_KEPT = 256  # chosen: sequences, some of which do not run any more; each takes 8 bytes a token


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One token each of B sequences. pattern: sparse [B * N, rows of a layer]; rows, begins: its columns, and where those of
    each row of it begin. weights: its values, flat, computed in place for one layer after another; scores_NS: of each sequence,
    a part of them."""

    owner: PagedGroups
    pattern: torch.Tensor
    rows: torch.Tensor
    begins: torch.Tensor
    weights: torch.Tensor
    scores_NS: list[torch.Tensor]

    def attend(self, layer: int, query_BNH: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, N * H]."""
        keys_HX, values_XH = self.owner.keys_HX[layer], self.owner.values_XH[layer]
        # beta: times what was there, the weights of the layer before, which are finite but in a row that is broken
        torch.sparse.sampled_addmm(self.pattern, query_BNH.flatten(0, 1), keys_HX, beta=0.0, alpha=scale, out=self.pattern)
        for scores_NS in self.scores_NS:
            torch.softmax(scores_NS, -1, out=scores_NS)
        output = torch.embedding_bag(values_XH, self.rows, self.begins, per_sample_weights=self.weights)[0]  # their sums
        return output.view(len(query_BNH), -1)


class PagedGroups:
    """Plans groups over a cache that lies on the CPU in float32, of a model with so many query heads. keys_HX, values_XH: of
    each layer, where one index finds a token's key in the one and its value in the other."""

    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._num_heads = num_heads
        self._row_of_head_N1 = (torch.arange(num_heads) * kv.num_kv_heads // num_heads * kv.block_size)[:, None]
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        self.keys_HX = [rows.t() for rows in kv.rows]
        self.values_XH = [rows[kv.num_kv_heads * kv.block_size :] for rows in kv.rows]
        with warnings.catch_warnings():  # told once in a process: sparse CSR tensors are in beta
            warnings.simplefilter("ignore")
            torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1))

    def group(self, tables: Seq[list[int]], num_ctx: Seq[int]) -> PagedGroup:
        """num_ctx: tokens that each sequence attends to."""
        sizes = [self._num_heads * num_tokens for num_tokens in num_ctx]
        rows = torch.empty(sum(sizes), dtype=torch.int64)
        for part, table, num_tokens in zip(torch.split(rows, sizes), tables, num_ctx, strict=True):
            torch.add(self._first_rows(table)[:num_tokens], self._row_of_head_N1, out=part.view(self._num_heads, num_tokens))
        lengths = torch.tensor(num_ctx).repeat_interleave(self._num_heads)
        ends = torch.constant_pad_nd(lengths.cumsum(0), (1, 0))
        pattern = torch.sparse_csr_tensor(ends, rows, torch.zeros(len(rows)), (len(lengths), len(self._kv.rows[0])))
        weights = pattern.values()
        scores_NS = [part.view(self._num_heads, -1) for part in torch.split(weights, sizes)]
        return PagedGroup(self, pattern, rows, ends[:-1], weights, scores_NS)

    def _first_rows(self, table: list[int]) -> torch.Tensor:
        """In which row the first head's key of each token stands. Most tables are as they were a step ago."""
        key = tuple(table)
        if key not in self._kept:
            if len(self._kept) == MAX_KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[key] = self._kv.first_rows([table], len(table) * self._kv.block_size)[0]
        return self._kept[key]
