"""What a decode request must be before its KV is pulled. Pure."""

from __future__ import annotations

from triptych.shared.engine.api import Engine
from triptych.shared.errors import InternalError
from triptych.shared.messages import DecodeRequest
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.token_bytes import BYTES_PER_TOKEN


def check_request(request: DecodeRequest, engine: Engine, max_model_len: int) -> None:
    """Compare the KV's reference with what this instance has.

    Raises:
        InternalError: the KV is of another layout, its sizes don't add up, or nothing is left to decode.
    """
    kv, num_output_tokens = request.kv, len(request.output) // BYTES_PER_TOKEN
    if kv.layout != engine.kv_layout or kv.block_size != engine.block_size:
        raise InternalError("the prompt's KV has another layout than this decode instance", code="kv_layout")
    if request.num_prompt_tokens < 1 or num_output_tokens < 1 or len(request.output) % BYTES_PER_TOKEN:
        raise InternalError("the request has no prompt, or no output to go on after", code="invalid_message")
    if kv.num_computed_tokens != request.num_prompt_tokens + num_output_tokens - 1:
        raise InternalError("the request's KV is not complete", code="kv_layout")
    shape, dtype = engine.exported_shape(num_blocks_for(kv.num_computed_tokens, kv.block_size))
    if kv.tensor.shape != shape or kv.tensor.dtype != str(dtype).removeprefix("torch."):
        raise InternalError("the prompt's KV has another shape than its number of tokens says", code="kv_layout")
    is_whole = num_output_tokens >= request.sampling.max_tokens
    if is_whole or request.num_prompt_tokens + num_output_tokens >= max_model_len:
        raise InternalError("the request leaves nothing to decode", code="invalid_message")
