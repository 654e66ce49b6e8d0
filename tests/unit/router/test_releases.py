"""Releases: sent to every instance that was touched, and once more after the bus was away."""

from __future__ import annotations

import asyncio

import pytest

from triptych.services.router import releases as module
from triptych.services.router.releases import Releases
from triptych.shared.messages import InstanceId, Message, ReleaseRequest, RequestId

ENCODER, PREFILL = InstanceId("encoder-0-a"), InstanceId("prefill-0-b")


class SpyBus:
    def __init__(self) -> None:
        self.sent: list[tuple[InstanceId, Message]] = []
        self.news = asyncio.Event()

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        self.sent.append((instance_id, message))
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.sent) < count:
                self.news.clear()
                await self.news.wait()


async def test_every_instance_is_told() -> None:
    bus = SpyBus()
    releases = Releases(bus)
    releases.release(RequestId("r"), {PREFILL, ENCODER})
    assert not releases.is_idle
    await releases.stop()
    assert releases.is_idle
    assert bus.sent == [(ENCODER, ReleaseRequest(RequestId("r"))), (PREFILL, ReleaseRequest(RequestId("r")))]


async def test_nobody_touched_nobody_told() -> None:
    bus = SpyBus()
    Releases(bus).release(RequestId("r"), set())
    assert not bus.sent


async def test_said_again_after_a_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_AFTER_S", 0.0)
    bus = SpyBus()
    releases = Releases(bus)
    releases.release(RequestId("r1"), {ENCODER})
    releases.release(RequestId("r2"), {PREFILL})
    await bus.until(2)
    releases.on_reconnected()
    releases.on_reconnected()  # twice in a row is one repetition
    await bus.until(4)
    await releases.stop()
    assert bus.sent[2:] == bus.sent[:2]


async def test_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_AFTER_S", 0.0)
    bus = SpyBus()
    releases = Releases(bus)
    releases.release(RequestId("old"), {ENCODER})
    monkeypatch.setattr(module, "REMEMBERED_S", 0.0)
    releases.release(RequestId("new"), {ENCODER})
    await bus.until(2)
    monkeypatch.setattr(module, "REMEMBERED_S", 30.0)
    releases.on_reconnected()
    await bus.until(3)
    assert bus.sent[2:] == [(ENCODER, ReleaseRequest(RequestId("new")))]
