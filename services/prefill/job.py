"""One prompt in the prefill role: how far its KV is there, and what can be computed of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.cache.block_keys import BlockChain
from triptych.services.prefill.inputs import PromptInputs
from triptych.shared.engine.api import Sequence
from triptych.shared.policies.batching import MAX_BRIEF_TOKENS

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


@dataclass(frozen=True, slots=True)
class PulledBlocks:
    """A peer's KV of blocks [first, end) of a prompt, as export_blocks made it; it lies outside of the pool."""

    first: int
    end: int
    tensor: torch.Tensor


@dataclass(slots=True, eq=False)
class PrefillJob:
    """num_tokens: of the prompt, output that is known already included. chain: their block keys, None when nothing is cached.
    result: the next token. While is_in_step the engine thread uses its blocks: a job that leaves then is freed when the step
    ends. num_landed_when_parked: see PrefillBatch. arrived_at_s, slack_s, work_s: for the queue order. Times are monotonic.
    """

    sequence: Sequence
    num_tokens: int
    inputs: PromptInputs
    result: asyncio.Future[int]
    arrived_at_s: float
    slack_s: float | None = None
    work_s: float = 0.0
    chain: BlockChain | None = None
    pulled: PulledBlocks | None = None
    num_cached_tokens: int = 0
    begun_at_s: float | None = None
    num_landed_when_parked: int = -1
    is_prepared: bool = False
    is_in_step: bool = False
    has_left: bool = False

    @property
    def keys(self) -> list[bytes]:
        """Of all full blocks."""
        return [] if self.chain is None else self.chain.keys

    @property
    def cacheable_keys(self) -> list[bytes]:
        """Of those whose KV may come from a cache: the last token is always computed."""
        return self.keys if self.chain is None or self.chain.tail else self.keys[:-1]

    @property
    def num_pending_tokens(self) -> int:
        """Not computed, nor expected to be cached."""
        return self.num_tokens - max(self.sequence.num_computed_tokens, self.num_cached_tokens)

    @property
    def takes_long(self) -> bool:
        """All of it that has to be computed."""
        return self.num_tokens - self.num_cached_tokens > MAX_BRIEF_TOKENS

    def num_ready(self, num_computed: int, attends_to_all: bool) -> int:
        """How many tokens can be computed after the first num_computed: up to the first image that has not landed."""
        missing = [span for span in self.sequence.images if span.embeddings is None and span.end > num_computed]
        if missing and attends_to_all:
            return 0
        end = missing[0].offset if missing else len(self.sequence.token_ids)
        return max(end - num_computed, 0)
