"""Opens the transport of a process, real or emulated, as its settings say. Torch is loaded only for a real one."""

from __future__ import annotations

import asyncio
import importlib

from triptych.shared.emulation import link_of
from triptych.shared.service import ServiceContext
from triptych.shared.transport.api import Transport
from triptych.shared.transport.emulated import EmulatedTransport


async def open_transport(frame: ServiceContext) -> Transport:
    """It listens when this returns."""
    settings = frame.settings
    if settings.emulate:
        emulated = EmulatedTransport(
            frame.instance_id,
            control=frame.bus,
            capacity_bytes=settings.tensor_store_bytes,
            link=link_of(settings),
            time_scale=settings.time_scale,
            transfer_timeout_s=settings.transfer_timeout_s,
        )
        await emulated.start()
        return emulated
    # torch takes seconds to import: in a thread that blocks nobody; where it is there already this is a look-up
    await asyncio.to_thread(importlib.import_module, "triptych.shared.transport.transport")
    from triptych.shared.transport.transport import InstanceTransport

    transport = InstanceTransport(
        frame.instance_id,
        control=frame.bus,
        bind_host=frame.bind_host,
        capacity_bytes=settings.tensor_store_bytes,
        mode=settings.transport,
        transfer_timeout_s=settings.transfer_timeout_s,
    )
    await transport.start()
    return transport
