"""Sampling: greedy, the right distribution, one draw per token, and generators that can be brought to where they were."""

from __future__ import annotations

import torch

from triptych.shared.engine.sampling import make_generator, sample
from triptych.shared.messages import SamplingParams


def sampled(seed: int | None = 1, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=temperature, seed=seed)


def test_greedy_takes_the_largest_and_has_no_generator() -> None:
    greedy = SamplingParams(max_tokens=8)
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert make_generator(greedy) is None
    assert sample(logits, [greedy, greedy], [None, None]) == [1, 0]


def test_a_very_low_temperature_is_greedy() -> None:
    assert make_generator(sampled(temperature=1e-9)) is None


def test_frequencies_follow_the_softmax() -> None:
    params = sampled(seed=3, temperature=2.0)
    logits = torch.tensor([[2.0, 0.0, -1.0, float("-inf")]])
    generator = make_generator(params)
    num_draws = 4000
    drawn = [sample(logits, [params], [generator])[0] for _ in range(num_draws)]
    expected = torch.softmax(logits[0] / 2.0, dim=-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / num_draws
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.03)
    assert counts[3] == 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    params = [sampled(seed=i, temperature=0.5 + i) for i in range(4)] + [SamplingParams(max_tokens=8)]
    alone = [sample(logits[i : i + 1], [params[i]], [make_generator(params[i])])[0] for i in range(5)]
    order = [3, 4, 0, 2, 1]
    batched = sample(logits[order], [params[i] for i in order], [make_generator(params[i]) for i in order])
    assert batched == [alone[i] for i in order]
    assert batched[1] == int(logits[4].argmax())


def test_a_generator_comes_back_to_where_it_was_after_n_tokens() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    params = sampled(seed=-7)
    generator = make_generator(params)
    tokens = [sample(logits, [params], [generator])[0] for _ in range(40)]
    for num_sampled in (1, 17, 39):
        resumed = make_generator(params, num_sampled)
        assert [sample(logits, [params], [resumed])[0] for _ in range(40 - num_sampled)] == tokens[num_sampled:]
    assert len(set(tokens)) > 5


def test_without_a_seed_outputs_differ() -> None:
    logits = torch.zeros(1, 1 << 20)
    params = sampled(seed=None)
    assert sample(logits, [params], [make_generator(params)]) != sample(logits, [params], [make_generator(params)])


def test_broken_logits_give_some_token_of_the_vocabulary() -> None:
    logits = torch.full((2, 10), float("nan"))
    params = [sampled(), SamplingParams(max_tokens=8)]
    assert all(0 <= token < 10 for token in sample(logits, params, [make_generator(p) for p in params]))
