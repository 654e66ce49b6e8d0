"""Attention of single tokens straight from the KV blocks, on a CPU: nothing is gathered first, and kept between steps is only
where tokens stand.

Which rows of a layer are a head's keys is a sparse pattern, the same in all layers. Scores are the product of queries and rows
computed where the pattern says; the values stand a fixed number of rows behind their keys, so the same rows are then summed up
by their weights, as the embeddings of a bag. Numbers equal those of gathered attention but for rounding.
Shapes: B sequences of a group, N query heads, K kv heads, H head size, S tokens of context.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from triptych.shared.engine.kv_cache import KvCache

_SPARE_TOKENS = 64  # chosen: steps until the rows of a group are laid out anew


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One token each of B sequences. pattern: sparse [B * N, rows of a layer]; rows, begins: its columns, and where those of
    each row of it begin. scores, weights: its values, [B, N, S] and flat, computed in place for one layer after another.
    mask: additive [B, 1, S], or None."""

    owner: PagedGroups
    pattern: torch.Tensor
    rows: torch.Tensor
    begins: torch.Tensor
    scores: torch.Tensor
    weights: torch.Tensor
    mask: torch.Tensor | None

    def attend(self, layer: int, query_BNH: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, N * H]."""
        keys_HX, values_XH = self.owner.keys_HX[layer], self.owner.values_XH[layer]
        # beta: times what was there, the weights of the layer before, which are finite but in a row that is broken
        torch.sparse.sampled_addmm(self.pattern, query_BNH.flatten(0, 1), keys_HX, beta=0.0, alpha=scale, out=self.pattern)
        if self.mask is not None:
            self.scores.add_(self.mask)
        torch.softmax(self.scores, -1, out=self.scores)
        output = torch.embedding_bag(values_XH, self.rows, self.begins, per_sample_weights=self.weights)[0]  # their sums
        return output.view(len(query_BNH), -1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """As KvCache.first_rows, of one group as it was last: [B, C tokens of capacity]. tables: what they were made of."""

    tables: list[list[int]]
    rows_BC: torch.Tensor


class PagedGroups:
    """Plans groups over a cache that lies on the CPU in float32, of a model with so many query heads. keys_HX, values_XH: of
    each layer, where one index finds a token's key in the one and its value in the other."""

    def __init__(self, kv: KvCache, num_heads: int) -> None:
        self._kv = kv
        self._row_of_head_N1 = (torch.arange(num_heads) * kv.num_kv_heads // num_heads * kv.block_size)[:, None]
        self._kept: dict[int, _Rows] = {}
        self.keys_HX = [rows.t() for rows in kv.rows]
        self.values_XH = [rows[kv.num_kv_heads * kv.block_size :] for rows in kv.rows]
        with warnings.catch_warnings():  # told once in a process: sparse CSR tensors are in beta
            warnings.simplefilter("ignore")
            torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1))

    def group(self, tables: Seq[list[int]], num_ctx: list[int], number: int = 0) -> PagedGroup:
        """Longest context first. number: of the group among those of its pass."""
        mask, rows_BS = None, self._first_rows(number, tables, num_ctx[0])
        if num_ctx[-1] < num_ctx[0]:
            index_S, last_B1 = torch.arange(num_ctx[0]), torch.tensor(num_ctx)[:, None] - 1
            # padded with a sequence's own last token: a masked NaN still spreads, and must not come from another request
            rows_BS = rows_BS.gather(1, torch.minimum(index_S, last_B1))
            mask = torch.zeros(rows_BS.shape).masked_fill_(index_S > last_B1, float("-inf"))[:, None]
        rows_BNS = rows_BS[:, None] + self._row_of_head_N1
        rows = rows_BNS.view(-1)
        ends = torch.arange(0, len(rows) + 1, num_ctx[0])
        pattern = torch.sparse_csr_tensor(ends, rows, torch.zeros(len(rows)), (len(ends) - 1, len(self._kv.rows[0])))
        weights = pattern.values()
        return PagedGroup(self, pattern, rows, ends[:-1], weights.view(rows_BNS.shape), weights, mask)

    def _first_rows(self, number: int, tables: Seq[list[int]], num_tokens: int) -> torch.Tensor:
        """Most are as they were a step ago."""
        kept = self._kept.get(number)
        if kept is None or len(tables) != len(kept.tables) or num_tokens > kept.rows_BC.shape[1]:
            rows_BC = torch.empty(len(tables), num_tokens + _SPARE_TOKENS, dtype=torch.int64)
            kept = self._kept[number] = _Rows([[] for _ in tables], rows_BC)
        changed = [i for i, table in enumerate(tables) if table != kept.tables[i]]
        if changed:
            kept.rows_BC[changed] = self._kv.first_rows([tables[i] for i in changed], kept.rows_BC.shape[1])
            for i in changed:
                kept.tables[i] = tables[i].copy()
        return kept.rows_BC[:, :num_tokens]
