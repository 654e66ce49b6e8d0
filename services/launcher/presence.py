"""The launcher's place on the bus: it hears everybody's heartbeats, sends its own so that the scaler finds it, and takes
LaunchRequests."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from triptych.shared.bus import Bus, RequestHandler
from triptych.shared.instance_info import ModelCard, Resources
from triptych.shared.messages import HEARTBEAT_SUBJECT, LOST_SUBJECT, Event, Heartbeat, InstanceId
from triptych.shared.process_memory import pss_bytes
from triptych.shared.registry import Registry
from triptych.shared.service_app import new_instance_id
from triptych.shared.settings import Settings


class Presence:
    """`await Presence.join(...)`, then `leave()`. on_ready is called once for each instance that becomes ready."""

    def __init__(self, bus: Bus, instance_id: InstanceId, settings: Settings, on_ready: Callable[[Heartbeat], None]) -> None:
        self.bus = bus
        self._registry = Registry(settings.heartbeat_timeout_s, instance_id)
        self.instance_id = instance_id
        self._interval_s = settings.heartbeat_interval_s
        self._on_ready = on_ready
        self._told: set[InstanceId] = set()
        self._beater: asyncio.Task[None] | None = None

    @classmethod
    async def join(cls, settings: Settings, handler: RequestHandler, on_ready: Callable[[Heartbeat], None]) -> Presence:
        """Raises Overloaded when no NATS server answers."""
        instance_id = new_instance_id("launcher")
        bus = await Bus.connect(settings.nats_url, instance_id)
        presence = cls(bus, instance_id, settings, on_ready)
        presence._registry.on_lost(presence._told.discard)
        bus.on_reconnected(lambda: presence._registry.note_reconnected(time.monotonic()))
        for subject in (HEARTBEAT_SUBJECT, LOST_SUBJECT):
            await bus.listen(subject, presence._on_event)
        await bus.serve(instance_id, handler)
        presence._beater = asyncio.create_task(presence._beat_forever(), name="heartbeat")
        return presence

    async def leave(self) -> None:
        if self._beater is not None:
            self._beater.cancel()
        await self.bus.close()

    def ready_names(self) -> set[str]:
        """Slots whose process is ready."""
        return {beat.name for beat in self._registry.ready()}

    def url_of(self, name: str) -> str | None:
        """Where slot `name` serves HTTP, once that was heard."""
        return next((beat.http_url for beat in self._registry.all() if beat.name == name), None)

    def port_of(self, name: str) -> int | None:
        url = self.url_of(name)
        return urlsplit(url).port if url else None

    def model(self) -> ModelCard | None:
        """What the instances serve."""
        return next((beat.model for beat in self._registry.all() if beat.model is not None), None)

    def _on_event(self, event: Event) -> None:
        self._registry.on_event(event, time.monotonic())
        is_news = isinstance(event, Heartbeat) and event.state == "ready" and event.instance_id not in self._told
        if isinstance(event, Heartbeat) and is_news and event.instance_id != self.instance_id:
            self._told.add(event.instance_id)
            self._on_ready(event)

    async def _beat_forever(self) -> None:
        while True:
            if self.bus.is_connected:
                self._registry.sweep(time.monotonic())
                await self.bus.publish_event(HEARTBEAT_SUBJECT, self._heartbeat())
            await asyncio.sleep(self._interval_s)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            instance_id=self.instance_id,
            name="launcher",
            service="launcher",
            state="ready",
            roles=(),
            http_url="",
            interval_s=self._interval_s,
            host=socket.gethostname(),
            loads=(),
            resources=Resources(pid=os.getpid(), num_threads=1, pss_bytes=pss_bytes(os.getpid())),
        )
