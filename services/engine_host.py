"""Opens what one instance has below its roles: engine, KV pool, tensor transport. Called by instance.py.

Imports torch, which takes seconds: instance.py imports this module on the engine thread, not at its own import.
"""

from __future__ import annotations

import math

import msgspec
import structlog
import torch

from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.engine.api import Engine
from triptych.shared.engine.kv_blocks import KvBlocks
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.engine.role import HostContext
from triptych.shared.engine.thread import EngineThread
from triptych.shared.engine.torch_engine import load_engine
from triptych.shared.errors import InternalError
from triptych.shared.instance_info import ModelCard, Resources, TransportAddress
from triptych.shared.messages import InstanceId
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.transport.arena import STAMP_BYTES
from triptych.shared.transport.transport import InstanceTransport

_log = structlog.get_logger(__name__)


def open_engine(settings: Settings, num_threads: int) -> Engine:
    """Load the weights; on the engine thread, which torch's number of threads is about.

    Raises:
        BadRequest: the checkpoint or the settings can't be served.
    """
    torch.set_num_threads(num_threads)
    return load_engine(open_checkpoint(settings.model, settings.model_name), settings)


async def open_host(frame: ServiceContext, engine: Engine, thread: EngineThread, tasks: RequestTasks) -> HostContext:
    """What the roles work with; its transport listens."""
    settings = frame.settings
    transport = InstanceTransport(
        frame.instance_id,
        control=frame.bus,
        bind_host=frame.bind_host,
        capacity_bytes=settings.tensor_store_bytes,
        mode=settings.transport,
        transfer_timeout_s=settings.transfer_timeout_s,
    )
    await transport.start()
    frame.registry.on_lost(transport.forget_peer)

    async def peer_address(instance_id: InstanceId) -> TransportAddress | None:
        heartbeat = await frame.registry.find(instance_id)
        return None if heartbeat is None else heartbeat.transport

    return HostContext(
        settings=settings,
        instance_id=frame.instance_id,
        engine=engine,
        thread=thread,
        kv=KvBlocks(engine, transport),
        transport=transport,
        tasks=tasks,
        max_model_len=_max_model_len(engine, settings.tensor_store_bytes),
        peer_address=peer_address,
        publish_event=frame.bus.publish_event,
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
