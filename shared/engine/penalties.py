"""Penalties on tokens that came before, as OpenAI (presence, frequency) and transformers (repetition) define them.

A sequence's counts grow with its output, a token at a time; all rows of a batch are penalised in one go. Used by sampling.py.
Shapes: R rows, V vocabulary, N (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from triptych.shared.sampling_params import SamplingParams

FIRST_CAPACITY = 64  # chosen: most outputs have fewer distinct tokens


class TokenCounts:
    """How often each token is in an output; 0 for those that are only in the prompt.

    Args:
        prompt_ids: tokens that the repetition penalty knows from the beginning.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._num_counted = 0
        capacity = max(FIRST_CAPACITY, 2 * len(self._slots))
        self._ids = torch.zeros(capacity, dtype=torch.int64)
        self._counts = torch.zeros(capacity, dtype=torch.float32)
        self._ids[: len(self._slots)] = torch.tensor(list(self._slots), dtype=torch.int64)

    def follow(self, token_ids: Sequence[int], first: int) -> None:
        """Count the output token_ids[first:], of which the beginning has been counted before."""
        for i in range(first + self._num_counted, len(token_ids)):
            slot = self._slot(token_ids[i])  # first: it may put another tensor in place
            self._counts[slot] += 1
        self._num_counted = len(token_ids) - first

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot

    @property
    def ids(self) -> torch.Tensor:
        """int64, each token once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> torch.Tensor:
        """float32, of `ids`."""
        return self._counts[: len(self._slots)]


def has_penalty(params: SamplingParams) -> bool:
    """Whether the tokens before matter."""
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1


def penalise(
    logits_RV: torch.Tensor, rows: Sequence[int], samplings: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Change, in place, in these rows of logits_RV, the logits of the tokens in counts."""
    device = logits_RV.device
    sizes = torch.tensor([len(one.ids) for one in counts])
    row_N = torch.repeat_interleave(torch.tensor(rows), sizes).to(device)
    id_N = torch.cat([one.ids for one in counts]).to(device)
    count_N = torch.cat([one.counts for one in counts]).to(device)
    factors = torch.tensor([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in samplings])
    repetition_N, frequency_N, presence_N = torch.repeat_interleave(factors, sizes, dim=0).to(device).unbind(1)
    logit_N = logits_RV[row_N, id_N]
    logit_N = torch.where(logit_N < 0, logit_N * repetition_N, logit_N / repetition_N)
    logits_RV[row_N, id_N] = logit_N - frequency_N * count_N - presence_N * (count_N > 0)
