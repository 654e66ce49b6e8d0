"""Sampling: transformers' distributions, vLLM's penalties, draws that depend on nothing but the request, log probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.shared.engine.api import Sequence
from triptych.shared.engine.sampling import NUM_CANDIDATES, sample
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.token_set import token_set

NUM_PROMPT = 5
NUM_DRAWS = 5000


def sequence(output: list[int] | None = None, prompt: list[int] | None = None, **params: Any) -> Sequence:
    prompt = [1, 2, 2, 3, 4] if prompt is None else prompt
    return Sequence(RequestId("r"), [*prompt, *(output or [])], len(prompt), SamplingParams(max_tokens=1 << 20, **params))


def logits_of(num_rows: int, vocab_size: int = 100, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


def frequencies(logits_V: torch.Tensor, num_draws: int = NUM_DRAWS, **params: Any) -> torch.Tensor:
    """How often each token is drawn, over draws of other seeds, in batches."""
    counts = torch.zeros(len(logits_V))
    for first in range(0, num_draws, 500):
        batch = [sequence([5, 5, 6], seed=first + i, **params) for i in range(500)]
        counts += torch.bincount(torch.tensor(sample(logits_V.expand(500, -1), batch)), minlength=len(logits_V))
    return counts / num_draws


def expected(logits_V: torch.Tensor, **params: Any) -> torch.Tensor:
    """By transformers' processors, in the order that its `generate` has them."""
    processors = LogitsProcessorList()
    if "repetition_penalty" in params:
        processors.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(float(params.get("temperature", 1.0))))
    if "top_k" in params:
        processors.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        processors.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        processors.append(MinPLogitsWarper(params["min_p"]))
    said = torch.tensor([[1, 2, 2, 3, 4, 5, 5, 6]])
    return torch.softmax(processors(said, logits_V[None].clone())[0], dim=-1)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(params: dict[str, Any]) -> None:
    logits_V = logits_of(1)[0]
    wanted = expected(logits_V, **params)
    drawn = frequencies(logits_V, **{"temperature": 1.0, **params})
    assert bool((drawn[wanted == 0] == 0).all()), "a token that is filtered out was drawn"
    torch.testing.assert_close(drawn, wanted, rtol=0, atol=0.025)
    assert bool((drawn[wanted > 0.005] > 0).all()), "a token that is kept never came"


@pytest.mark.parametrize("params", [{"top_k": 500}, {"top_p": 0.97}, {"top_p": 0.9, "top_k": 600}, {"top_p": 1e-6}], ids=str)
def test_filters_over_more_than_the_first_candidates(params: dict[str, Any]) -> None:
    logits_V = logits_of(1, vocab_size=700, scale=1.0)[0]
    wanted = expected(logits_V, **params)
    drawn = frequencies(logits_V, temperature=1.0, **params)
    assert ("top_p", 1e-6) in params.items() or int((wanted > 0).sum()) > NUM_CANDIDATES
    assert bool((drawn[wanted == 0] == 0).all())
    torch.testing.assert_close(drawn, wanted, rtol=0, atol=0.01)
    assert bool((drawn[wanted > 1.5e-3] > 0).all())


def test_presence_and_frequency_penalties_count_the_output() -> None:
    """As OpenAI defines them: a token's logit loses its count times frequency_penalty, and presence_penalty once."""
    logits = torch.zeros(1, 10)
    logits[0, 5], logits[0, 6] = 3.0, 2.4
    assert sample(logits, [sequence([5, 5, 6], frequency_penalty=0.55)]) == [5]  # 3 - 1.1 > 2.4 - 0.55
    assert sample(logits, [sequence([5, 5, 6], frequency_penalty=0.65)]) == [6]
    assert sample(logits, [sequence([5], presence_penalty=0.5)]) == [5]
    assert sample(logits, [sequence([5, 5, 5], presence_penalty=0.5)]) == [5]
    assert sample(logits, [sequence([5], presence_penalty=0.7)]) == [6]
    assert sample(logits, [sequence(prompt=[5, 5, 5], presence_penalty=2.0, frequency_penalty=2.0)]) == [5]
    assert sample(logits, [sequence([5], presence_penalty=-2.0, repetition_penalty=1.5)]) == [5]  # 3 / 1.5 + 2


def test_a_repetition_penalty_knows_the_prompt_after_a_hand_off() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]])
    here = sequence([2], prompt=[1, 1, 3], repetition_penalty=2.0)
    moved = sequence([2], prompt=[0, 0, 0], repetition_penalty=2.0)
    moved.prompt_token_set = token_set([1, 1, 3])
    assert sample(logits, [here]) == sample(logits, [moved]) == [1]
    logits[0, 2] = 3.5
    assert sample(logits, [here]) == sample(logits, [moved]) == [2]


def test_counts_follow_a_growing_output() -> None:
    """Step by step the same as at once, with more distinct tokens than there is room for at first."""
    logits = logits_of(1, vocab_size=200)
    grown = sequence([], frequency_penalty=0.3, repetition_penalty=1.2)
    for token_id in range(100):
        grown.token_ids.append((7 * token_id) % 150)
        step = sample(logits, [grown])
        assert step == sample(logits, [sequence(grown.token_ids[NUM_PROMPT:], frequency_penalty=0.3, repetition_penalty=1.2)])
    assert sample(logits, [grown]) == step, "counting twice"


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.01},
    {"presence_penalty": 1.0},
    {"temperature": 1.2, "repetition_penalty": 1.3, "num_logprobs": 2},
    {"num_logprobs": 0},
    {"min_tokens": 9, "stop_token_ids": (3, 8)},
]


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = logits_of(len(MIXED), vocab_size=2000, scale=1.0)
    made = [sequence([i, 7], seed=i, **params) for i, params in enumerate(MIXED)]
    alone = [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(made)]
    order = [3, 4, 0, 8, 2, 1, 7, 6, 5]
    assert sample(logits[order], [made[i] for i in order]) == [alone[i] for i in order]
    assert alone[0] == int(logits[0].argmax())


def test_a_draw_depends_on_seed_and_place_alone() -> None:
    logits = torch.zeros(1, 1 << 16)
    first = [sample(logits, [sequence([0] * n, seed=-7, temperature=1.0)])[0] for n in range(20)]
    assert len(set(first)) == 20
    assert first == [sample(logits, [sequence([1] * n, prompt=[9], seed=-7, temperature=1.0)])[0] for n in range(20)]
    assert first[0] != sample(logits, [sequence([], seed=-6, temperature=1.0)])[0]


def test_float_noise_hardly_changes_a_draw() -> None:
    """Logits of another batch shape differ by up to 1e-6 relative; alone and in a batch must stay the same."""
    logits_V = logits_of(1, vocab_size=1000, scale=1.0)[0]
    noise = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(1)) * 1e-6
    drawn = [sequence(seed=i, temperature=1.0, top_p=0.95) for i in range(2000)]
    clean, noisy = sample(logits_V.expand(2000, -1), drawn), sample(logits_V + noise, drawn)
    assert sum(a != b for a, b in zip(clean, noisy, strict=True)) <= 1


def test_min_tokens_hold_back_stop_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    stops = (3, 2, 9000)  # one is outside of this vocabulary
    assert sample(logits, [sequence([0], min_tokens=2, stop_token_ids=stops)]) == [1]
    assert sample(logits, [sequence([0, 0], min_tokens=2, stop_token_ids=stops)]) == [3]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(2)
    shaped = {"temperature": 0.3, "top_k": 3, "presence_penalty": 1.5, "min_tokens": 3, "stop_token_ids": (3,)}
    batch = [sequence([5], num_logprobs=4, **shaped), sequence(num_logprobs=0)]
    tokens = sample(logits, batch)
    wanted = logits.log_softmax(-1)
    for row, one in enumerate(batch):
        assert one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(float(wanted[row, tokens[row]]), abs=1e-5)
    best = wanted[0].topk(4)
    assert [token_id for token_id, _ in batch[0].logprobs.top] == best.indices.tolist()  # type: ignore[union-attr]
    assert [value for _, value in batch[0].logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)  # type: ignore[union-attr]
    assert batch[1].logprobs.top == ()  # type: ignore[union-attr]


def test_a_very_low_temperature_is_greedy() -> None:
    assert sequence(temperature=1e-9).is_plain_greedy
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), [sequence(temperature=1e-9, min_tokens=1)]) == [1]


@pytest.mark.parametrize("params", MIXED, ids=str)
def test_broken_logits_give_some_token_of_the_vocabulary(params: dict[str, Any]) -> None:
    [token] = sample(torch.full((1, 10), float("nan")), [sequence([1], **{**params, "stop_token_ids": (3,)})])
    assert 0 <= token < 10
