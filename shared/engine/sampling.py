"""Next tokens from logits: greedy, or by temperature with one uniform number per token from the request's generator.

One number per token makes a request's output independent of its batch, and its generator easy to bring to where it was
after n tokens. Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.shared.messages import SamplingParams

MIN_TEMPERATURE = 1e-3  # chosen: below it, logits / temperature is no different from greedy


def make_generator(sampling: SamplingParams, num_sampled: int = 0) -> torch.Generator | None:
    """The generator of a request that has num_sampled output tokens; None for a greedy one. Without a seed it starts from
    the system's randomness."""
    if sampling.temperature < MIN_TEMPERATURE:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
        return generator
    generator.manual_seed(sampling.seed & (2**64 - 1))
    for _ in range(num_sampled):  # one by one: a vector of n is not the same as n draws
        _draw(generator)
    return generator


def sample(
    logits_BV: torch.Tensor, samplings: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> list[int]:
    """One token per row: the largest logit where the generator is None, else by the inverse of the cumulated distribution
    at one uniform number."""
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    rows = [row for row, generator in enumerate(generators) if generator is not None]
    if not rows:
        return tokens
    temperatures = torch.tensor([samplings[row].temperature for row in rows], dtype=torch.float64)
    uniforms = torch.tensor([_draw(generator) for generator in generators if generator is not None], dtype=torch.float64)
    chosen_BV = logits_BV[rows].to(torch.float64)
    probs_BV = torch.softmax(chosen_BV / temperatures.to(logits_BV.device)[:, None], dim=-1)
    cdf_BV = probs_BV.cumsum(dim=-1)
    thresholds_B1 = (uniforms.to(logits_BV.device) * cdf_BV[:, -1])[:, None]
    drawn = torch.searchsorted(cdf_BV, thresholds_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    for row, token in zip(rows, drawn[:, 0].tolist(), strict=True):
        tokens[row] = token
    return tokens


def _draw(generator: torch.Generator) -> float:
    """One number in [0, 1), always by the same path of torch's generator."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))
