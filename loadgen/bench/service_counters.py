"""What the services of a cluster say that they did: their heartbeats; their Prometheus counters, summed over all processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from triptych.shared.bus import Bus
from triptych.shared.messages import HEARTBEAT_SUBJECT, Event, Heartbeat, InstanceId, StatusReply, StatusRequest

ASK_TIMEOUT_S = 10.0  # chosen: many heartbeats


async def heartbeats(nats_url: str) -> tuple[Heartbeat, ...]:
    """The last ones of all processes of a cluster, which its scaler has heard."""
    scaler: asyncio.Future[InstanceId] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        if isinstance(event, Heartbeat) and event.service == "scaler" and not scaler.done():
            scaler.set_result(event.instance_id)

    bus = await Bus.connect(nats_url, "loadgen")
    try:
        await bus.listen(HEARTBEAT_SUBJECT, on_event)
        reply = await bus.request(await asyncio.wait_for(scaler, ASK_TIMEOUT_S), StatusRequest(), ASK_TIMEOUT_S)
    finally:
        await bus.close()
    assert isinstance(reply, StatusReply)
    return reply.instances


async def service_counters(http: aiohttp.ClientSession, urls: Sequence[str], prefix: str = "triptych_") -> Counter[str]:
    """Counters by name (without prefix and _total), whatever their labels, of the services at these addresses."""
    total: Counter[str] = Counter()
    for url in urls:
        async with http.get(f"{url}/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                if family.type == "counter" and family.name.startswith(prefix):
                    name = family.name.removeprefix(prefix)
                    total[name] += sum(int(sample.value) for sample in family.samples if sample.name.endswith("_total"))
    return total


async def gauge(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """Of one service, summed over its labels."""
    async with http.get(f"{url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return sum(sample.value for family in families if family.name == name for sample in family.samples)
