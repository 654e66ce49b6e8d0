"""Opens what a real instance has below its roles: engine, KV pool, tensor transport. Called by instance.py.

Imports torch, which takes seconds: instance.py imports this module on the engine thread, not at its own import.
"""

from __future__ import annotations

import torch

from triptych.cache.redis_index import open_index
from triptych.services.host_context import HostContext
from triptych.services.instance_parts import HostParts, host_context
from triptych.shared.checkpoint import open_checkpoint
from triptych.shared.engine.api import Engine
from triptych.shared.engine.shared_cores import shared_cores
from triptych.shared.engine.thread import EngineCalls, EngineThread
from triptych.shared.engine.torch_engine import TorchEngine, load_engine
from triptych.shared.machine import num_cores
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.transport.opening import open_transport


def open_engine(settings: Settings, num_threads: int) -> TorchEngine:
    """Load the weights; on the engine thread, which torch's number of threads is about.

    Raises:
        BadRequest: the checkpoint or the settings can't be served.
    """
    torch.set_num_threads(num_threads)
    return load_engine(open_checkpoint(settings.model, settings.model_name), settings)


def share_cores(engine: TorchEngine, thread: EngineThread, path: str, least: int) -> None:
    """From now on the engine computes with the cores that others leave to it; at least so many."""
    thread.cores = shared_cores(path, num_cores(), least, torch.set_num_threads)
    engine.share_cores(thread.cores)


async def open_host(frame: ServiceContext, engine: Engine, thread: EngineCalls, tasks: RequestTasks) -> HostContext:
    """What the roles work with; its transport listens."""
    transport, index = await open_transport(frame), open_index(frame.settings, engine.model_card.revision)
    parts = HostParts(frame.settings, engine, thread, transport, index, _host_memory)
    return host_context(frame, parts, tasks)


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
