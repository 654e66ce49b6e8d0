"""One request in the decode role: where its KV is, what was sent of it, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.cache.block_keys import BlockChain
from triptych.shared.engine.api import Sequence
from triptych.shared.engine.role import LEASE_GRACE_S
from triptych.shared.messages import DecodeRequest, InstanceId, StageTime
from triptych.shared.sampling_params import TokenLogprobs
from triptych.shared.token_bytes import BYTES_PER_TOKEN, unpack_tokens

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


@dataclass(slots=True, eq=False)
class DecodeJob:
    """A request's KV is in its sequence's blocks, or outside of the pool, as export_blocks made it, when it was pulled and
    waits for blocks, or was preempted: the first blocks in `shared`, each by itself under its key, all others in `kv`. chain:
    the keys of its full blocks, those of the prompt while it runs; None when nothing is cached. is_kept: they are in the cache.
    num_found: blocks of `shared` that were in the cache still when it got its blocks, and need not be imported.

    joined: set when it runs for the first time. finished: set after its last chunk, or with the error that ends it. While
    is_in_step the engine thread uses its blocks: a job that leaves then is freed when that ends. unsent: output tokens from
    next_seq on. stepped_at_s: it got its last token, or arrived. stays_until_s: it was handed over, nobody took it: it is not
    handed over again before. Times are monotonic.
    """

    request: DecodeRequest
    sequence: Sequence
    arrived_at_s: float
    joined: asyncio.Future[None]
    finished: asyncio.Future[None]
    chain: BlockChain | None = None
    is_kept: bool = False
    kv: torch.Tensor | None = None
    shared: dict[bytes, torch.Tensor] = field(default_factory=dict)
    num_found: int = 0
    is_preempted: bool = False
    is_in_step: bool = False
    has_left: bool = False
    transfer_s: float = 0.0
    begun_at_s: float | None = None
    stepped_at_s: float = 0.0
    last_sign_at_s: float = 0.0
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)
    next_seq: int = 1
    stays_until_s: float = 0.0

    @property
    def num_made(self) -> int:
        """Tokens that were added here."""
        return self.sequence.num_output_tokens - len(self.request.output) // BYTES_PER_TOKEN

    @property
    def num_to_come(self) -> int:
        """Tokens at most, in a context without a limit."""
        return self.sequence.sampling.max_tokens - self.sequence.num_output_tokens

    def num_left(self, max_model_len: int) -> int:
        """Tokens that its output may still get."""
        sequence = self.sequence
        return min(self.num_to_come, max_model_len - len(sequence.token_ids))

    def extend_chain(self) -> None:
        """To all that is computed."""
        if self.chain is not None:
            self.chain.extend(self.sequence.token_ids[self.chain.num_tokens : self.sequence.num_computed_tokens])

    def lease_s(self, now_s: float) -> float:
        """How long whoever goes on with it may need its KV."""
        return self.request.timeout_s - (now_s - self.arrived_at_s) + LEASE_GRACE_S

    def time(self, instance_id: InstanceId, now_s: float) -> StageTime:
        """What the stage spent on it so far."""
        begun_at_s = now_s if self.begun_at_s is None else self.begun_at_s
        queued_s = max(begun_at_s - self.arrived_at_s - self.transfer_s, 0.0)
        return StageTime("decode", instance_id, queued_s, self.transfer_s, now_s - begun_at_s)


def new_job(request: DecodeRequest, chain: BlockChain | None, now_s: float) -> DecodeJob:
    """The prompt's ids are not known here and not needed: their KV is. They are zeros in the sequence; penalties that need
    them have prompt_token_set."""
    loop, output = asyncio.get_running_loop(), unpack_tokens(request.output)
    sequence = Sequence(
        request_id=request.request_id,
        token_ids=[0] * request.num_prompt_tokens + output,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        num_computed_tokens=request.kv.num_computed_tokens,
        position_delta=request.kv.position_delta,
        prompt_token_set=request.prompt_token_set,
    )
    joined, finished = loop.create_future(), loop.create_future()
    return DecodeJob(
        request, sequence, now_s, joined, finished, chain, stepped_at_s=now_s, last_sign_at_s=now_s, next_seq=len(output)
    )
