"""How many steps of a batch an emulated instance makes as one call (EmulatedSteps). Used by batch.py."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.services.decode.job import DecodeJob
from triptych.services.host_context import HostContext

MAX_STEPS = 64  # chosen, where the time scale is high: half of what a chunk of tokens has at most


def num_steps_ahead(context: HostContext, batch: Sequence[DecodeJob]) -> int:
    """Until the first output is as long as it may get; all have the blocks for them then. 1 where blocks are scarce; 0 where
    the engine has to be asked, which imports KV and tells probabilities."""
    ahead, kv = context.steps_ahead, context.kv
    if ahead is None or any(job.kv is not None or job.sequence.sampling.num_logprobs is not None for job in batch):
        return 0
    num_steps = min(MAX_STEPS, ahead.num_within([job.sequence for job in batch]))
    num_steps = min(num_steps, *(job.num_left(context.max_model_len) for job in batch))
    num_lacking = [kv.num_for(job.sequence.num_computed_tokens + num_steps) - len(job.sequence.block_table) for job in batch]
    blocks = kv.allocate(sum(num for num in num_lacking if num > 0), keep_free=kv.num_claimed)
    if blocks is None:
        return 1
    for job, num in zip(batch, num_lacking, strict=True):
        if num > 0:
            job.sequence.block_table += blocks[-num:]
            del blocks[-num:]
    return num_steps
