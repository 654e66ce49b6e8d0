"""What a decode request must be before its KV is pulled. Pure."""

from __future__ import annotations

from triptych.shared.engine.api import Engine
from triptych.shared.errors import InternalError
from triptych.shared.messages import DecodeRequest
from triptych.shared.policies.batching import num_blocks_for


def check_request(request: DecodeRequest, engine: Engine, max_model_len: int) -> None:
    """Compare the KV's reference with what this instance has.

    Raises:
        InternalError: the KV is of another layout, its sizes don't add up, or nothing is left to decode.
    """
    kv = request.kv
    if kv.layout != engine.kv_layout or kv.block_size != engine.block_size:
        raise InternalError("the prompt's KV has another layout than this decode instance", code="kv_layout")
    if kv.num_computed_tokens != request.num_prompt_tokens or kv.num_computed_tokens < 1:
        raise InternalError("the prompt's KV is not complete", code="kv_layout")
    shape, dtype = engine.exported_shape(num_blocks_for(kv.num_computed_tokens, kv.block_size))
    if kv.tensor.shape != shape or kv.tensor.dtype != str(dtype).removeprefix("torch."):
        raise InternalError("the prompt's KV has another shape than its number of tokens says", code="kv_layout")
    if request.num_prompt_tokens + 1 >= max_model_len or request.sampling.max_tokens < 2:
        raise InternalError("the request leaves nothing to decode", code="invalid_message")
