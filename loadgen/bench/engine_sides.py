"""What bench engine compares within this process: our engine, transformers' batched `generate`, and its bare forward pass.

A side computes all prompts of a case first and then all other tokens, and says how long each took. vLLM is in vllm_side.py,
a process of its own. Shapes: B sequences, T tokens of a prompt.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import transformers

from triptych.shared.checkpoint import Checkpoint
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.torch_engine import load_engine
from triptych.shared.messages import RequestId
from triptych.shared.policies.batching import chunk_sizes, num_blocks_for
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import load_settings

CacheKind = Literal["static", "dynamic"]
_untyped: Any = transformers  # most of transformers has no annotations


@dataclass(frozen=True, slots=True)
class Case:
    """How many prompts of how many tokens, and how many tokens each is to be answered with (at least 2)."""

    num_prompt_tokens: int
    batch_size: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """prefill_s: from the prompts to the first token of all; decode_s: from there to the last token of all."""

    prefill_s: float
    decode_s: float


class EngineSide(Protocol):
    """Random prompts that depend on `seed`: no two share a prefix. The first num_token_ids tokens of the vocabulary are
    plain text."""

    async def run(self, case: Case, seed: int) -> Timing:
        """Measure once."""
        ...


def random_prompts(case: Case, seed: int, num_token_ids: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(num_token_ids) for _ in range(case.num_prompt_tokens)] for _ in range(case.batch_size)]


def num_plain_token_ids(checkpoint: Checkpoint) -> int:
    """Token ids below this are no special ones."""
    special = [checkpoint.image_token_id, *checkpoint.eos_token_ids]
    special += [value for name, value in checkpoint.config.items() if name.endswith("_token_id") and isinstance(value, int)]
    return min(special)


class TriptychSide:
    """Our engine as the roles drive it: prompts in chunks of max_prefill_tokens, then one token of each sequence per step."""

    def __init__(self, checkpoint: Checkpoint, kv_cache_bytes: int) -> None:
        self._settings = load_settings(model=str(checkpoint.path), kv_cache_bytes=kv_cache_bytes)
        self._engine = load_engine(checkpoint, self._settings)
        self._num_token_ids = num_plain_token_ids(checkpoint)

    async def run(self, case: Case, seed: int) -> Timing:
        sequences = [self._sequence(case, prompt) for prompt in random_prompts(case, seed, self._num_token_ids)]
        try:
            return self._timed(sequences, case.num_output_tokens)
        finally:
            for sequence in sequences:
                self._engine.block_pool.free(sequence.block_table)

    def _sequence(self, case: Case, prompt: list[int]) -> Sequence:
        sampling = SamplingParams(max_tokens=case.num_output_tokens)
        sequence = Sequence(RequestId("bench"), list(prompt), len(prompt), sampling)
        num_blocks = num_blocks_for(len(prompt) + case.num_output_tokens, self._engine.block_size)
        sequence.block_table = self._engine.block_pool.allocate(num_blocks)
        return sequence

    def _timed(self, sequences: list[Sequence], num_output_tokens: int) -> Timing:
        began_s = time.perf_counter()
        for sequence in sequences:
            self._engine.prepare(sequence)
        waiting = sequences
        while waiting:
            left = [sequence.num_prompt_tokens - sequence.num_computed_tokens for sequence in waiting]
            sizes = chunk_sizes(left, self._settings.max_prefill_tokens)
            self._step([Chunk(sequence, size) for sequence, size in zip(waiting, sizes, strict=True) if size])
            waiting = [sequence for sequence in waiting if not sequence.num_output_tokens]
        prefilled_s = time.perf_counter()
        for _ in range(num_output_tokens - 1):
            self._step([Chunk(sequence, 1) for sequence in sequences])
        return Timing(prefilled_s - began_s, time.perf_counter() - prefilled_s)

    def _step(self, chunks: list[Chunk]) -> None:
        for chunk, token in zip(chunks, self._engine.run(chunks), strict=True):
            if token is not None:
                chunk.sequence.token_ids.append(token)


class _TokenClock:
    """A streamer for `generate`, which puts the prompts first and then one token of each sequence after another."""

    def __init__(self) -> None:
        self.put_at_s: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.put_at_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


class TransformersModel:
    """The checkpoint in transformers' own class, for the two sides that use it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        _untyped.utils.logging.disable_progress_bar()
        kind = _untyped.Qwen2_5_VLForConditionalGeneration
        self.model: Any = kind.from_pretrained(Path(checkpoint.path), dtype=torch.float32, use_safetensors=True).eval()
        self.num_token_ids = num_plain_token_ids(checkpoint)

    def prompts(self, case: Case, seed: int) -> torch.Tensor:
        """int64 [B, T]."""
        return torch.tensor(random_prompts(case, seed, self.num_token_ids))


@dataclass(frozen=True, slots=True)
class GenerateSide:
    """Greedy `generate` over the whole batch."""

    loaded: TransformersModel
    cache: CacheKind

    @torch.inference_mode()
    async def run(self, case: Case, seed: int) -> Timing:
        tokens_BT, clock = self.loaded.prompts(case, seed), _TokenClock()
        began_s = time.perf_counter()
        self.loaded.model.generate(
            input_ids=tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=case.num_output_tokens,
            cache_implementation=self.cache,
            streamer=clock,
        )
        first_s, last_s = clock.put_at_s[1], clock.put_at_s[-1]
        return Timing(first_s - began_s, last_s - first_s)


@dataclass(frozen=True, slots=True)
class ForwardSide:
    """Nothing but the forward pass and the last layer's logits: what no engine on these modules can be faster than."""

    loaded: TransformersModel
    cache: CacheKind

    @torch.inference_mode()
    async def run(self, case: Case, seed: int) -> Timing:
        tokens_BT = self.loaded.prompts(case, seed)
        text = self.loaded.model.config.text_config
        num_tokens = case.num_prompt_tokens + case.num_output_tokens
        is_static = self.cache == "static"
        cache = _untyped.StaticCache(text, max_cache_len=num_tokens) if is_static else _untyped.DynamicCache(config=text)
        began_s = time.perf_counter()
        self._pass(tokens_BT, 0, cache)
        prefilled_s = time.perf_counter()
        for i in range(case.num_output_tokens - 1):
            self._pass(tokens_BT[:, :1], case.num_prompt_tokens + i, cache)
        return Timing(prefilled_s - began_s, time.perf_counter() - prefilled_s)

    def _pass(self, tokens_BT: torch.Tensor, start: int, cache: Any) -> None:
        model = self.loaded.model
        positions = torch.arange(start, start + tokens_BT.shape[1]).expand(3, len(tokens_BT), -1)
        hidden = model.model.language_model(input_ids=tokens_BT, position_ids=positions, past_key_values=cache, use_cache=True)
        model.lm_head(hidden.last_hidden_state[:, -1])
