"""What goes into the next step of a stage: how many waiting items, how many tokens of each prompt, when an output ends."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.shared.messages import FinishReason
from triptych.shared.sampling_params import SamplingParams

MAX_BRIEF_TOKENS = 256  # chosen: of a prompt that is soon computed; 0.2 s of a core at the bench checkpoint's size (measured)
MAX_BRIEF_S = 0.2  # chosen: the same of pictures, whose tokens take longer
ENOUGH_S = 0.1  # chosen: what every pass of the vision tower costs, 5 ms on an A100 (cost_model), is 5 % of this


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


def num_to_batch(sizes: Sequence[int], max_total: int) -> int:
    """How many items from the front fit in max_total, in order; one that is larger alone goes alone."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > max_total and count > 0:
            return count
    return len(sizes)


def num_to_encode(sizes: Sequence[int], max_tokens: int, tokens_per_s: float) -> int:
    """How many images from the front go through the vision tower together: as many as take ENOUGH_S. What is in a pass waits
    for the whole of it, as does what comes meanwhile, and more would hardly gain throughput. Ours: both papers encode as much
    at once as there is.

    Args:
        sizes: vision tokens.
        max_tokens: of a batch.
        tokens_per_s: of late; 0 before anything was encoded, then one goes alone.
    """
    return num_to_batch(sizes, min(max_tokens, int(ENOUGH_S * tokens_per_s)))


def is_brief(num_tokens: int, tokens_per_s: float) -> bool:
    """Whether so many vision tokens are soon encoded. tokens_per_s: of late; 0 before anything was encoded: nobody knows."""
    return num_tokens <= MAX_BRIEF_S * tokens_per_s


def chunk_sizes(num_remaining: Sequence[int], max_tokens: int) -> list[int]:
    """Tokens of each prompt in the next prefill step: first come, first served, until max_tokens are given out; prompts
    beyond get 0. As Sarathi-Serve (arXiv 2403.02310) cuts prompts, but without decode tokens in the batch."""
    sizes = []
    for remaining in num_remaining:
        size = min(remaining, max_tokens)
        sizes.append(size)
        max_tokens -= size
    return sizes


def finish_reason(
    sampling: SamplingParams, token_id: int, num_output_tokens: int, num_tokens: int, max_model_len: int
) -> FinishReason | None:
    """Why the output ends with token_id, if it does. Both counts include token_id; a stop token is not to be shown."""
    if token_id in sampling.stop_token_ids:
        return "stop"
    if num_output_tokens >= sampling.max_tokens or num_tokens >= max_model_len:
        return "length"
    return None
