"""Opens what an emulated instance has below its roles: an engine whose time is modelled, a transport of stand-ins. No torch.

Called by instance.py in place of engine_host.py. Starting takes its time, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from prometheus_client import Gauge

from triptych.cache.redis_index import open_index
from triptych.services.host_context import HostContext
from triptych.services.instance_parts import HostParts, host_context
from triptych.shared.emulation import cost_model_of, open_model
from triptych.shared.engine.emulated import EmulatedEngine
from triptych.shared.engine.emulated_calls import EmulatedCalls
from triptych.shared.engine.emulated_steps import EmulatedSteps
from triptych.shared.errors import BadRequest
from triptych.shared.messages import Role
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings
from triptych.shared.transport.opening import open_transport
from triptych.shared.transport.stand_in import stand_in_host_memory

_log = structlog.get_logger(__name__)


async def open_emulated_host(
    frame: ServiceContext, calls: EmulatedCalls, roles: tuple[Role, ...], tasks: RequestTasks
) -> HostContext:
    """What the roles work with, after the modelled start-up time.

    Raises:
        BadRequest: no figures for the model or the GPU, or it does not fit.
    """
    settings = frame.settings
    cost = cost_model_of(settings, roles)
    engine = EmulatedEngine(cost, open_model(settings), settings, calls.spend)  # first: a wrong setting is told at once
    _log.info("emulated", what=cost.name, time_scale=settings.time_scale, startup_s=cost.startup_s)
    await asyncio.sleep(cost.startup_s / settings.time_scale)
    transport, index = await open_transport(frame), open_index(settings, engine.model_card.revision)
    lag = Gauge(
        "triptych_emulation_lag_seconds",
        "how late the last modelled step ended",
        registry=frame.metrics,
    )
    lag.set_function(lambda: calls.lag_s)
    lost = Gauge(
        "triptych_emulation_lost_seconds",
        "by how much steps ended late in all: beside the time that passed, what the machine did not keep up with",
        registry=frame.metrics,
    )
    lost.set_function(lambda: calls.lost_s)
    steps = EmulatedSteps(engine, calls, settings.stream_interval_s)
    parts = HostParts(settings, engine, calls, transport, index, stand_in_host_memory, steps)
    return host_context(frame, parts, tasks)


def check_switch(settings: Settings, initial: Sequence[Role], wanted: Sequence[Role]) -> None:
    """An instance that only encodes may stand for another number of GPUs: then it has no other model in its memory.

    Raises:
        BadRequest: it can't have these roles.
    """
    if cost_model_of(settings, initial).name != cost_model_of(settings, wanted).name:
        raise BadRequest("an emulated instance cannot change its number of GPUs", code="other_gpus")
