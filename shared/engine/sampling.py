"""Next tokens from logits: greedy by argmax; other rows with penalties, temperature, filters and log probabilities.

A token is drawn as the argmax of logit / temperature + noise (noise.py), so a draw changes only where two tokens are that
close: float noise of another batch shape hardly ever does. Filters in transformers' order: top_k, top_p, min_p.
Shapes: B sequences, R rows that are not plain greedy, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from triptych.shared.engine.api import Sequence
from triptych.shared.engine.noise import gumbel, keys_of
from triptych.shared.engine.penalties import TokenCounts, has_penalty, penalise
from triptych.shared.sampling_params import MIN_TEMPERATURE, SamplingParams, TokenLogprobs
from triptych.shared.token_set import token_ids_of

NUM_CANDIDATES = 256  # measured, of 152,000 tokens: 0.35 ms per row, sorting all of them 29; top_p hardly ever keeps more
WIDENING = 16  # chosen: where it keeps more
MAX_DRAWN = 1 << 19  # chosen: logits that are worked on at once, 2 MB: they stay in a core's cache
LEAST_LOGPROB = -9999.0  # as vLLM: JSON has no infinity


def sample(logits_BV: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    """The next token of each sequence; sets `logprobs` of those that ask for it. A row doesn't depend on the others."""
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    rows = [row for row, sequence in enumerate(sequences) if not sequence.is_plain_greedy]
    if rows:
        for row, token in zip(rows, _sample_rows(logits_BV[rows].float(), [sequences[row] for row in rows]), strict=True):
            tokens[row] = token
    return tokens


def _sample_rows(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
    samplings = [sequence.sampling for sequence in sequences]
    shaped_RV = logits_RV.clone()
    _suppress_stop_tokens(shaped_RV, sequences)
    _penalise(shaped_RV, sequences)
    tokens_R = shaped_RV.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature >= MIN_TEMPERATURE]
    at_once = max(1, MAX_DRAWN // logits_RV.shape[-1])
    for rows in (drawn[i : i + at_once] for i in range(0, len(drawn), at_once)):
        keys_R2 = keys_of([(samplings[row].seed, sequences[row].num_output_tokens) for row in rows])
        tokens_R[rows] = _draw(shaped_RV[rows], [samplings[row] for row in rows], keys_R2.to(logits_RV.device))
    tokens: list[int] = tokens_R.tolist()
    _note_logprobs(logits_RV, sequences, tokens)
    return tokens


def _draw(logits_RV: torch.Tensor, samplings: Seq[SamplingParams], keys_R2: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [R]. All temperatures are at least MIN_TEMPERATURE."""
    device, vocab_size = logits_RV.device, logits_RV.shape[-1]
    scaled_RV = logits_RV / torch.tensor([[s.temperature] for s in samplings], device=device)
    scaled_RV -= scaled_RV.amax(dim=-1, keepdim=True)
    least_R1 = torch.tensor([[math.log(s.min_p) if s.min_p else -math.inf] for s in samplings], device=device)
    tokens_R = torch.empty(len(samplings), dtype=torch.int64, device=device)
    filtered = [row for row, s in enumerate(samplings) if s.top_k or s.top_p < 1]
    if others := sorted(set(range(len(samplings))) - set(filtered)):
        vocabulary = torch.arange(vocab_size, dtype=torch.int32, device=device)
        tokens_R[others] = _best(scaled_RV[others], vocabulary, least_R1[others], keys_R2[others])
    width = min(NUM_CANDIDATES, vocab_size)
    while filtered:
        values_RK, ids_RK, is_settled_R = _candidates(scaled_RV[filtered], [samplings[row] for row in filtered], width)
        best_R = _best(values_RK, ids_RK.int(), least_R1[filtered], keys_R2[filtered])
        tokens_R[filtered] = ids_RK.gather(1, best_R[:, None])[:, 0]
        filtered = [row for row, is_settled in zip(filtered, is_settled_R.tolist(), strict=True) if not is_settled]
        width = min(WIDENING * width, vocab_size)
    return tokens_R


def _best(values_RK: torch.Tensor, ids_RK: torch.Tensor, least_R1: torch.Tensor, keys_R2: torch.Tensor) -> torch.Tensor:
    """The place of each row's draw, of tokens whose value is at least least_R1 (min_p)."""
    scores = gumbel(keys_R2, ids_RK) + values_RK
    return scores.masked_fill_(values_RK < least_R1, -math.inf).argmax(dim=-1)


def _candidates(
    scaled_RV: torch.Tensor, samplings: Seq[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What top_k and top_p leave of the `width` most probable tokens: values (-inf for what they don't), token ids, and
    whether that is all they leave. The token that crosses top_p is in; so are those that tie with the k-th."""
    num_tokens, device = scaled_RV.shape[-1], scaled_RV.device
    top_k_R1 = torch.tensor([[s.top_k or num_tokens] for s in samplings], device=device)
    top_p_R1 = torch.tensor([[s.top_p if s.top_p < 1 else math.inf] for s in samplings], device=device)
    values_RK, ids_RK = scaled_RV.topk(width)
    values_RK = values_RK.masked_fill(values_RK < values_RK.gather(1, (top_k_R1 - 1).clamp(max=width - 1)), -math.inf)
    has_top_k = top_k_R1 <= width
    total_R1 = torch.where(has_top_k, values_RK.logsumexp(1, keepdim=True), scaled_RV.logsumexp(1, keepdim=True))
    probs_RK = (values_RK.double() - total_R1).exp()
    before_RK = probs_RK.cumsum(dim=-1) - probs_RK
    is_out_RK = before_RK >= top_p_R1
    is_out_RK[:, 0] = False
    is_settled_R1 = has_top_k | (is_out_RK[:, -1:] & (top_k_R1 >= num_tokens))
    if width == num_tokens:
        is_settled_R1 = torch.ones_like(is_settled_R1)
    return values_RK.masked_fill(is_out_RK, -math.inf), ids_RK, is_settled_R1[:, 0]


def _suppress_stop_tokens(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Until min_tokens are out, the output can't end by itself."""
    pairs = [
        (row, token_id)
        for row, sequence in enumerate(sequences)
        if sequence.num_output_tokens < sequence.sampling.min_tokens
        for token_id in sequence.sampling.stop_token_ids
        if token_id < logits_RV.shape[-1]
    ]
    if pairs:
        rows, token_ids = zip(*pairs, strict=True)
        logits_RV[list(rows), list(token_ids)] = -math.inf


def _penalise(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> None:
    rows = [row for row, sequence in enumerate(sequences) if has_penalty(sequence.sampling)]
    if not rows:
        return
    counts = [_token_counts(sequences[row]) for row in rows]
    penalise(logits_RV, rows, [sequences[row].sampling for row in rows], counts)


def _token_counts(sequence: Sequence) -> TokenCounts:
    if sequence.token_counts is None:
        repeats = sequence.sampling.repetition_penalty != 1
        prompt = token_ids_of(sequence.prompt_token_set) or sequence.token_ids[: sequence.num_prompt_tokens]
        sequence.token_counts = TokenCounts(prompt if repeats else ())
    sequence.token_counts.follow(sequence.token_ids, sequence.num_prompt_tokens)
    return sequence.token_counts


def _note_logprobs(logits_RV: torch.Tensor, sequences: Seq[Sequence], tokens: list[int]) -> None:
    """From the logits as the model made them."""
    counts = {row: s.sampling.num_logprobs for row, s in enumerate(sequences) if s.sampling.num_logprobs is not None}
    if not counts:
        return
    rows = list(counts)
    logprobs_RV = logits_RV[rows].log_softmax(dim=-1).clamp_(min=LEAST_LOGPROB)
    chosen = logprobs_RV.gather(1, torch.tensor([[tokens[row]] for row in rows], device=logits_RV.device))[:, 0].tolist()
    top = logprobs_RV.topk(max(counts.values()))
    for row, own, values, ids in zip(rows, chosen, top.values.tolist(), top.indices.tolist(), strict=True):
        sequences[row].logprobs = TokenLogprobs(own, tuple(zip(ids[: counts[row]], values, strict=False)))
