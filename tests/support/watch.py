"""Listens to a cluster's heartbeats: who is there, and whether everything that requests took was given back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Self

import aiohttp
import nats
from nats.aio.msg import Msg

from triptych.shared.messages import HEARTBEAT_SUBJECT, Heartbeat
from triptych.shared.wire import decode_event

ALL_SERVICES = ("router", "preprocess", "instance", "scaler")
CONNECT_TIMEOUT_S = 15.0  # chosen: a cluster that has ended shall fail the test, not hang it
HEARTBEAT_INTERVAL_S = 0.5  # the default setting: what a heartbeat shows may be that old


class Watch:
    """`async with Watch(nats_url) as watch`. beats: the last heartbeat of each instance that sent one since the start."""

    def __init__(self, nats_url: str) -> None:
        self._nats_url = nats_url
        self._news = asyncio.Event()
        self.beats: dict[str, Heartbeat] = {}
        self._at_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        async def quiet(_error: Exception) -> None:
            """The server is killed in some tests."""

        async with asyncio.timeout(CONNECT_TIMEOUT_S):  # without a bound of its own: it would try for ever
            self._client = await nats.connect(self._nats_url, error_cb=quiet, connect_timeout=5, max_reconnect_attempts=-1)
        await self._client.subscribe(HEARTBEAT_SUBJECT, cb=self._on_message)
        await self._client.flush(timeout=5)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._client.close()

    async def _on_message(self, message: Msg) -> None:
        event = decode_event(message.data)
        assert isinstance(event, Heartbeat)
        self.beats[event.instance_id] = event
        self._at_s[event.instance_id] = time.monotonic()
        self._news.set()

    async def until(self, holds: Callable[[dict[str, Heartbeat]], bool], timeout_s: float, what: str) -> float:
        """Waits until `holds` of the heartbeats of living instances; the seconds that took."""
        begin_s = time.monotonic()
        while not holds(self.living()):
            left_s = begin_s + timeout_s - time.monotonic()
            told = "\n".join(describe(beat) for beat in self.living().values())
            assert left_s > 0, f"waited {timeout_s:.1f} s in vain for: {what}\n{told}"
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), min(left_s, 0.5))
            except TimeoutError:
                continue
        return time.monotonic() - begin_s

    def living(self) -> dict[str, Heartbeat]:
        """Heartbeats of the last five intervals, by instance id."""
        now_s = time.monotonic()
        return {name: beat for name, beat in self.beats.items() if now_s - self._at_s[name] < 5 * HEARTBEAT_INTERVAL_S}

    def of(self, name: str) -> Heartbeat:
        """The newest instance in the slot whose name starts with `name`, such as encoder or encoder-0."""
        found = [beat for beat in self.beats.values() if beat.name.startswith(name)]
        assert found, f"no heartbeat of {name}: {sorted(self.beats)}"
        return max(found, key=lambda beat: self._at_s[beat.instance_id])

    async def until_complete(self, timeout_s: float = 20.0) -> None:
        """All four services and all three roles are ready."""
        await self.until(is_complete, timeout_s, "every service and role to be ready")

    async def until_at_rest(self, within_s: float, what: str, services: tuple[str, ...] = ALL_SERVICES) -> float:
        """Every instance has, in a heartbeat made after this call, nothing waiting, running, leased or taken. A heartbeat
        tells of a moment up to an interval ago, which is added to the bound. services: those that must be there."""
        begin_s = time.monotonic()

        def holds(beats: dict[str, Heartbeat]) -> bool:
            fresh = [beat for name, beat in beats.items() if self._at_s[name] > begin_s]
            is_there = {beat.service for beat in fresh} >= set(services)
            return is_there and len(fresh) == len(beats) and all(is_at_rest(beat) for beat in fresh)

        took_s = await self.until(holds, within_s + HEARTBEAT_INTERVAL_S, f"nothing held any more: {what}")
        await self.check_integrity()
        return took_s

    async def check_integrity(self) -> None:
        """No instance has ever found a KV block that nobody accounts for."""
        for name, failures in (await self.values_of("triptych_kv_integrity_failures_total")).items():
            assert failures == 0, f"{name} lost count of its KV blocks"

    async def until_checked(self, within_s: float = 15.0) -> None:
        """`check_integrity`, once all instances have looked since they were last at work: some seconds after that."""
        async with asyncio.timeout(within_s):
            while not all((await self.values_of("triptych_kv_integrity_checked")).values()):  # noqa: ASYNC110 - their state
                await asyncio.sleep(0.2)  # how often it is asked
        await self.check_integrity()

    async def values_of(self, metric: str) -> dict[str, float]:
        """Its value at each that has started, and lives."""
        values = {}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10), trust_env=False) as http:
            started = [beat for beat in self.living().values() if beat.service == "instance" and beat.state != "starting"]
            for beat in started:
                async with http.get(f"{beat.http_url}/metrics") as response:
                    found = re.search(rf"^{metric} (\S+)$", await response.text(), re.MULTILINE)
                assert found is not None, f"{beat.instance_id} has no {metric}"
                values[beat.instance_id] = float(found[1])
        return values


def is_complete(beats: dict[str, Heartbeat]) -> bool:
    ready = [beat for beat in beats.values() if beat.state == "ready"]
    services = {beat.service for beat in ready}
    roles = {role for beat in ready for role in beat.roles}
    return services >= set(ALL_SERVICES) and roles >= {"encoder", "prefill", "decode"}


def is_at_rest(beat: Heartbeat) -> bool:
    held = beat.resources
    is_idle = all(load.num_waiting == load.num_running == load.num_pending_tokens == 0 for load in beat.loads)
    is_free = held.num_free_blocks + held.num_cached_blocks == held.num_blocks and held.num_leased_blocks == 0
    return is_idle and is_free and held.num_leases == 0 and held.tensor_store_bytes == 0


def describe(beat: Heartbeat) -> str:
    held = beat.resources
    loads = ", ".join(
        f"{load.stage}: {load.num_waiting} waiting, {load.num_running} running, {load.num_pending_tokens} tokens"
        for load in beat.loads
    )
    return (
        f"  {beat.instance_id} {beat.state} pid {held.pid}: blocks {held.num_free_blocks} free + {held.num_cached_blocks} "
        f"cached + {held.num_leased_blocks} leased of {held.num_blocks}; {held.num_leases} leases, "
        f"{held.tensor_store_bytes} B in store; {loads}"
    )
