"""One request in the decode role: where its KV is, what was sent of it, how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.shared.engine.api import Sequence
from triptych.shared.messages import DecodeRequest, InstanceId, StageTime
from triptych.shared.sampling_params import TokenLogprobs

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


@dataclass(slots=True, eq=False)
class DecodeJob:
    """A request's KV is in its sequence's blocks, or in `kv` (as export_blocks made it) when it was pulled and waits for
    blocks, or was preempted.

    joined: set when it runs for the first time. finished: set after its last chunk, or with the error that ends it. While
    is_in_step the engine thread uses its blocks: a job that leaves then is freed when that ends. unsent: output tokens after
    the first num_sent of this stage. Times are monotonic.
    """

    request: DecodeRequest
    sequence: Sequence
    arrived_at_s: float
    joined: asyncio.Future[None]
    finished: asyncio.Future[None]
    kv: torch.Tensor | None = None
    is_preempted: bool = False
    is_in_step: bool = False
    has_left: bool = False
    transfer_s: float = 0.0
    begun_at_s: float | None = None
    last_sign_at_s: float = 0.0
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_sent: int = 0

    @property
    def num_kv_bytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes

    def time(self, instance_id: InstanceId, now_s: float) -> StageTime:
        """What the stage spent on it so far."""
        begun_at_s = now_s if self.begun_at_s is None else self.begun_at_s
        queued_s = max(begun_at_s - self.arrived_at_s - self.transfer_s, 0.0)
        return StageTime("decode", instance_id, queued_s, self.transfer_s, now_s - begun_at_s)


def new_job(request: DecodeRequest, now_s: float) -> DecodeJob:
    """The prompt's ids are not known here and not needed: their KV is. They are zeros in the sequence; penalties that need
    them have prompt_token_set."""
    loop = asyncio.get_running_loop()
    sequence = Sequence(
        request_id=request.request_id,
        token_ids=[0] * request.num_prompt_tokens + [request.first_token],
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        num_computed_tokens=request.kv.num_computed_tokens,
        position_delta=request.kv.position_delta,
        prompt_token_set=request.prompt_token_set,
    )
    return DecodeJob(request, sequence, now_s, loop.create_future(), loop.create_future(), last_sign_at_s=now_s)
