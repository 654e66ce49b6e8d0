"""What an instance has below its roles, put together from its parts, and what its heartbeat tells of them. No torch.

Called by engine_host.py and emulated_host.py, which open the parts, and by instance.py. A HostContext is made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from triptych.cache.index import CacheIndex
from triptych.services.embedding_cache import EmbeddingCache
from triptych.services.host_context import HostContext
from triptych.services.instance_metrics import InstanceMetrics
from triptych.services.prefix_cache import PrefixCache
from triptych.shared.engine.api import Engine
from triptych.shared.engine.emulated_steps import EmulatedSteps
from triptych.shared.engine.health import EngineHealth
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.engine.thread import EngineCalls
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import ModelCard, Resources, TransportAddress
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.policy_set import policy_set
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
    """What is opened first. settings: those that the roles go by. transport: it listens. index: closed by the host.
    host_memory, steps_ahead: see HostContext."""

    settings: Settings
    engine: Engine
    thread: EngineCalls
    transport: Transport
    index: CacheIndex
    host_memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    steps_ahead: EmulatedSteps | None = None


def host_context(frame: ServiceContext, parts: HostParts, tasks: RequestTasks) -> HostContext:
    """What the roles work with.

    Raises:
        BadRequest: there is no such policy.
    """
    engine, transport, index, holder = parts.engine, parts.transport, parts.index, frame.instance_id
    policies = policy_set(parts.settings.policy)
    kv = KvBlocks(engine, transport)
    embeddings_bytes = parts.settings.embedding_cache_bytes if policies.cache.keeps_embeddings else 0
    frame.on_lost(transport.forget_peer)

    async def peer_address(instance_id: InstanceId) -> TransportAddress | None:
        heartbeat = await frame.registry.find(instance_id)
        return None if heartbeat is None else heartbeat.transport

    def has_peer(role: Role) -> bool:
        is_bound = role in policies.routing.coupled  # then a request can't leave the instance that it began on
        return not is_bound and any(beat.instance_id != holder for beat in frame.registry.ready(role=role))

    return HostContext(
        settings=parts.settings,
        policies=policies,
        instance_id=holder,
        engine=engine,
        thread=parts.thread,
        health=EngineHealth(parts.settings.max_engine_failures, frame.lifecycle.give_up),
        kv=kv,
        prefixes=PrefixCache(engine, kv, index, holder, policies.cache.keeps_kv),
        embeddings=EmbeddingCache(transport, index, holder, embeddings_bytes),
        index=index,
        transport=transport,
        tasks=tasks,
        metrics=InstanceMetrics(frame.metrics),
        max_model_len=_max_model_len(engine, parts.settings.tensor_store_bytes),
        peer_address=peer_address,
        has_peer=has_peer,
        ask=frame.bus.request,
        publish_event=frame.bus.publish_event,
        host_memory=parts.host_memory,
        steps_ahead=parts.steps_ahead,
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
        embeddings=context.embeddings.stats(),
        kv_prefixes=context.prefixes.stats(),
    )


def model_card_of(context: HostContext) -> ModelCard:
    """The engine's, with what this instance really takes."""
    return msgspec.structs.replace(context.engine.model_card, max_model_len=context.max_model_len)


def integrity_error(context: HostContext) -> str | None:
    """What is wrong with the counts of an idle instance."""
    pool, num_kept = context.kv.pool, len(context.prefixes)
    try:
        pool.check_integrity()
        context.prefixes.check_integrity()
        context.embeddings.check_integrity()
    except (InternalError, AssertionError, RuntimeError) as error:  # the last one: something changed meanwhile
        return str(error)
    if pool.num_free + pool.num_cached != pool.num_blocks:
        return f"idle, but {pool.num_used} KV blocks are in use and {pool.num_leased} leased"
    return None if pool.num_cached == num_kept else f"{pool.num_cached} KV blocks are cached, and {num_kept} of them known"
