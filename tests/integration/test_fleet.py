"""Emulated instances of one process that come and go: the process lives on, and nothing of those that left is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.own_server import OwnNats
from support.watch import Watch
from triptych.services.instance import InstanceService
from triptych.shared.bus import Bus
from triptych.shared.fleet import Make, live_together
from triptych.shared.messages import Accepted, DrainRequest, InstanceId, Launched, ScaleOutRequest
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.service import ServiceApp
from triptych.shared.settings import Settings

PROCESS = InstanceId("emulated-0-ab")
WAIT_S = 60.0  # chosen: generous, for a machine with much else to do
POLL_S = 0.02


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[OwnNats]:
    server = await OwnNats.start(tmp_path)
    yield server
    server.stop()


async def until_ready(watch: Watch, name: str) -> None:
    await watch.until(lambda beats: any((beat.name, beat.state) == (name, "ready") for beat in beats.values()), WAIT_S, name)


async def test_nothing_is_kept_of_those_that_left(own_nats: OwnNats) -> None:
    settings = Settings(
        nats_url=own_nats.url, emulate="a100", model="llama-3.2-11b", time_scale=1000.0, heartbeat_interval_s=0.1
    )
    launched: list[weakref.ref[InstanceService]] = []

    def first(settings: Settings) -> ServiceApp:
        return InstanceService(settings, ROLES_OF["text"])

    def one_more(kind: str, _group: str) -> Make:
        def make(settings: Settings) -> ServiceApp:
            service = InstanceService(settings, ROLES_OF[kind])
            launched.append(weakref.ref(service))
            return service

        return make

    def kept() -> list[InstanceService | None]:
        gc.collect()
        return [service for service in (one() for one in launched) if service is not None]

    living = asyncio.create_task(live_together(PROCESS, settings, {"text-0": first}, one_more))
    bus = await Bus.connect(own_nats.url, "test")
    async with Watch(own_nats.url) as watch:
        await until_ready(watch, "text-0")
        for _ in range(2):
            reply = await bus.request(PROCESS, ScaleOutRequest("text", ""), WAIT_S)
            assert isinstance(reply, Launched)
            name = reply.name
            await until_ready(watch, name)
            assert len(kept()) == 1
            assert isinstance(await bus.request(watch.of(name).instance_id, DrainRequest(), WAIT_S), Accepted)
            async with asyncio.timeout(WAIT_S):
                while kept():  # noqa: ASYNC110 - the collector tells no event
                    await asyncio.sleep(POLL_S)
        await bus.request(watch.of("text-0").instance_id, DrainRequest(), WAIT_S)
        assert await asyncio.wait_for(living, WAIT_S) == 0
    await bus.close()
    assert len(launched) == 2
