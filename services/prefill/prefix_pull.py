"""Brings the KV of a prompt's beginning from the instance that is thought to hold it. Whatever goes wrong, the prompt is
computed: the index that named the holder is a hint.
"""

from __future__ import annotations

import structlog

from triptych.cache.block_keys import MAX_PACKED_KEYS_BYTES, pack_keys
from triptych.cache.keys import KEY_BYTES
from triptych.services.host_context import HostContext
from triptych.services.prefill.job import PulledBlocks
from triptych.shared.errors import TriptychError
from triptych.shared.messages import BlocksReply, BlocksRequest, PrefillRequest

ANSWER_TIMEOUT_S = 2.0  # chosen: a holder answers at once, from its event loop; longer waits cost more than computing

_log = structlog.get_logger(__name__)


async def pull_prefix(context: HostContext, request: PrefillRequest, keys: list[bytes], num_held: int) -> PulledBlocks | None:
    """What the holder has of these blocks beyond the first num_held, which are here; None when that is nothing."""
    source, asked = request.prefix, asked_for(request, keys)
    if source is None or len(asked) <= num_held:
        return None
    lease_s = context.settings.transfer_timeout_s
    blocks = BlocksRequest(request.request_id, request.router_id, pack_keys(asked), lease_s, num_held)
    try:
        reply = await context.ask(source.instance_id, blocks, min(lease_s, ANSWER_TIMEOUT_S))
        if not isinstance(reply, BlocksReply) or reply.kv is None or not _fits(context, reply, len(asked) - num_held):
            return None
        tensor = await context.pull_kv(reply.kv)
        context.metrics.kv_pulls.inc()
        return PulledBlocks(num_held, num_held + reply.num_blocks, tensor)
    except TriptychError as error:
        _log.info("cached KV could not be pulled", holder=source.instance_id, code=error.code)
        return None


def asked_for(request: PrefillRequest, keys: list[bytes]) -> list[bytes]:
    """The blocks that are looked for elsewhere, of those with these keys: as many as a message holds."""
    num_blocks = 0 if request.prefix is None else request.prefix.num_blocks
    return keys[: min(num_blocks, MAX_PACKED_KEYS_BYTES // KEY_BYTES)]


def _fits(context: HostContext, reply: BlocksReply, num_asked: int) -> bool:
    shape, dtype = context.engine.exported_shape(reply.num_blocks)
    what = None if reply.kv is None else (reply.kv.shape, reply.kv.dtype)
    is_like_ours = what == (shape, str(dtype).removeprefix("torch.")) and reply.layout == context.engine.kv_layout
    return is_like_ours and 0 < reply.num_blocks <= num_asked
