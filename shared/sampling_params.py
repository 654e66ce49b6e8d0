"""How the tokens of one output are chosen, and what is told of them: parts of messages (see messages.py)."""

from __future__ import annotations

import msgspec

MIN_TEMPERATURE = 1e-3  # chosen: below it, logits / temperature is no different from greedy


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How output tokens are chosen; names and meanings as in vLLM, values that do nothing as defaults (top_k 0: all tokens).

    max_tokens and min_tokens count output tokens, the first included. stop_token_ids (the model's own among them, unless the
    client ignores those) end the output and are no part of it. num_logprobs: how many of the most probable tokens are told
    with each token and its own log probability; None: no probabilities at all. temperature 0 is greedy.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    num_logprobs: int | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the largest logit is asked for."""
        is_shaped = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.min_tokens
        return self.temperature < MIN_TEMPERATURE and not is_shaped and self.num_logprobs is None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters. top: token ids and
    theirs, most probable first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
