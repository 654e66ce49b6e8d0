"""What an instance has below its roles, put together from its parts, and what its heartbeat tells of them. No torch.

Called by engine_host.py and emulated_host.py, which open the parts, and by instance.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from triptych.shared.engine.api import Engine
from triptych.shared.engine.health import EngineHealth
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.engine.role import HostContext
from triptych.shared.engine.thread import EngineCalls
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import ModelCard, Resources, TransportAddress
from triptych.shared.messages import InstanceId
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.transport.api import Transport
from triptych.shared.transport.memory import STAMP_BYTES

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    from collections.abc import Callable

    import torch

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostParts:
    """What is opened first. settings: those that the roles go by. transport: it listens. host_memory: see HostContext."""

    settings: Settings
    engine: Engine
    thread: EngineCalls
    transport: Transport
    host_memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def host_context(frame: ServiceContext, parts: HostParts, tasks: RequestTasks) -> HostContext:
    """What the roles work with."""
    engine, transport = parts.engine, parts.transport
    frame.registry.on_lost(transport.forget_peer)

    async def peer_address(instance_id: InstanceId) -> TransportAddress | None:
        heartbeat = await frame.registry.find(instance_id)
        return None if heartbeat is None else heartbeat.transport

    return HostContext(
        settings=parts.settings,
        instance_id=frame.instance_id,
        engine=engine,
        thread=parts.thread,
        health=EngineHealth(parts.settings.max_engine_failures, frame.lifecycle.give_up),
        kv=KvBlocks(engine, transport),
        transport=transport,
        tasks=tasks,
        max_model_len=_max_model_len(engine, parts.settings.tensor_store_bytes),
        peer_address=peer_address,
        publish_event=frame.bus.publish_event,
        host_memory=parts.host_memory,
    )


def _max_model_len(engine: Engine, tensor_store_bytes: int) -> int:
    """Tokens of prompt and output that model and KV pool allow, and whose KV can move: it lies in the tensor store whole while
    it is pulled. A longer prompt would be computed, and then never reach its decode instance."""
    shape, dtype = engine.exported_shape(1)
    num_blocks = (tensor_store_bytes - STAMP_BYTES) // (dtype.itemsize * math.prod(shape))
    movable = num_blocks * engine.block_size
    limit = min(engine.model_card.max_model_len, engine.block_pool.num_blocks * engine.block_size)
    if movable < limit:
        _log.warning("the tensor store bounds the context", max_model_len=movable, would_be=limit)
    return min(limit, movable)


def resources_of(context: HostContext) -> Resources:
    """Blocks and leases of an instance; the rest is filled in by the service frame."""
    pool = context.engine.block_pool
    used_bytes, capacity_bytes, num_leases = context.transport.usage()
    return Resources(
        pid=0,
        num_threads=0,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_leased_blocks=pool.num_leased,
        tensor_store_bytes=used_bytes,
        tensor_store_capacity_bytes=capacity_bytes,
        num_leases=num_leases,
    )


def model_card_of(context: HostContext) -> ModelCard:
    """The engine's, with what this instance really takes."""
    return msgspec.structs.replace(context.engine.model_card, max_model_len=context.max_model_len)


def integrity_error(pool: BlockPool) -> str | None:
    """What is wrong with the block counts of an idle instance."""
    try:
        pool.check_integrity()
    except InternalError as error:
        return error.message
    if pool.num_free + pool.num_cached != pool.num_blocks:
        return f"idle, but {pool.num_used} KV blocks are in use and {pool.num_leased} leased"
    return None
