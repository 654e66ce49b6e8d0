"""The registry: who is ready, who is lost and told once, and whose silence does not count."""

from __future__ import annotations

import asyncio

import pytest

from triptych.shared.instance_info import Resources
from triptych.shared.messages import Heartbeat, InstanceId, Lost, Role, Service, State, TokenBatch
from triptych.shared.registry import Registry

TIMEOUT_S = 3.0


def beat(name: str, state: State = "ready", service: Service = "instance", roles: tuple[Role, ...] = ("encoder",)) -> Heartbeat:
    return Heartbeat(InstanceId(name), name, service, state, roles, "", 0.5, "host", (), Resources(1, 1))


def lost(name: str) -> Lost:
    return Lost(InstanceId(name), name, 1, expected=False)


@pytest.fixture
def registry() -> Registry:
    return Registry(TIMEOUT_S)


@pytest.fixture
def told(registry: Registry) -> list[str]:
    told: list[str] = []
    registry.on_lost(told.append)
    return told


def names(beats: list[Heartbeat]) -> list[str]:
    return sorted(beat.name for beat in beats)


def test_ready_filters_by_state_service_and_role(registry: Registry) -> None:
    for event in (
        beat("a"),
        beat("b", roles=("encoder", "decode")),
        beat("c", state="starting"),
        beat("d", state="draining"),
        beat("r", service="router", roles=()),
    ):
        registry.on_event(event, 0.0)
    assert names(registry.all()) == ["a", "b", "c", "d", "r"]
    assert names(registry.ready()) == ["a", "b", "r"]
    assert names(registry.ready(role="decode")) == ["b"]
    assert names(registry.ready(service="router")) == ["r"]
    assert registry.ready(service="router", role="encoder") == []


def test_the_last_heartbeat_counts(registry: Registry) -> None:
    registry.on_event(beat("a", state="starting"), 0.0)
    registry.on_event(beat("a"), 1.0)
    assert registry.get(InstanceId("a")) == beat("a")
    registry.on_event(beat("a", state="draining"), 2.0)
    assert registry.ready() == []


def test_a_silent_instance_is_lost_once_and_welcome_again(registry: Registry, told: list[str]) -> None:
    registry.on_event(beat("a"), 0.0)
    registry.on_event(beat("b"), 2.0)
    registry.sweep(TIMEOUT_S)
    assert told == []
    registry.sweep(TIMEOUT_S + 0.1)
    registry.sweep(TIMEOUT_S + 0.2)
    assert told == ["a"]
    assert names(registry.ready()) == ["b"]
    registry.on_event(beat("a"), 4.0)
    assert names(registry.ready()) == ["a", "b"]


def test_an_ended_instance_is_lost_once_and_its_late_heartbeats_ignored(registry: Registry, told: list[str]) -> None:
    registry.on_event(beat("a"), 0.0)
    registry.on_event(lost("a"), 0.1)
    registry.on_event(lost("a"), 0.2)
    registry.on_event(beat("a"), 0.3)
    assert told == ["a"]
    assert registry.all() == []
    assert [registry.has_ended(InstanceId(name)) for name in ("a", "never-seen")] == [True, False]
    registry.on_event(lost("never-seen"), 0.4)
    assert told == ["a", "never-seen"]


def test_a_lost_callback_still_finds_the_heartbeat(registry: Registry) -> None:
    seen: list[Heartbeat | None] = []
    registry.on_lost(lambda instance_id: seen.append(registry.get(instance_id)))
    registry.on_event(beat("a"), 0.0)
    registry.on_event(lost("a"), 0.1)
    assert seen == [beat("a")]
    assert registry.get(InstanceId("a")) is None


def test_after_our_own_silence_nobody_is_lost_for_one_timeout(registry: Registry, told: list[str]) -> None:
    registry.on_event(beat("a"), 0.0)
    registry.note_reconnected(10.0)
    registry.sweep(10.1)
    assert told == []
    registry.sweep(10.0 + TIMEOUT_S)
    assert told == ["a"]


def test_while_our_own_heartbeats_do_not_come_back_nobody_is_lost(told: list[str]) -> None:
    """The bus hangs for 5 s with its connections open, then everything comes at once, ours a little before the others'."""
    registry = Registry(TIMEOUT_S, InstanceId("own"))
    registry.on_lost(told.append)
    for name in ("own", "a", "dead"):
        registry.on_event(beat(name), 0.0)
    for now_s in (0.5, 1.0, 1.6, 2.5, 3.1, 4.0, 5.0):
        registry.sweep(now_s)
    registry.on_event(beat("own"), 5.1)
    registry.sweep(5.2)
    assert told == []
    for now_s in (5.3, 6.0, 7.0, 8.0, 8.1):
        for name in ("own", "a"):
            registry.on_event(beat(name), now_s)
        registry.sweep(now_s)
    assert told == ["dead"], "who stays silent when the bus is back is lost one timeout later"


def test_the_time_that_we_stood_still_is_nobodys_silence(registry: Registry, told: list[str]) -> None:
    registry.on_event(beat("a"), 0.0)
    registry.note_stall(8.0, 9.0)
    registry.sweep(9.0)
    assert told == []
    registry.on_event(beat("b"), 9.0)
    registry.note_stall(8.0, 10.0)
    registry.sweep(10.0 + TIMEOUT_S)
    assert told == [], "nobody was seen later than now"
    registry.sweep(10.1 + TIMEOUT_S)
    assert told == ["a", "b"]


def test_a_process_that_always_stands_still_notices_the_dead_all_the_same(registry: Registry, told: list[str]) -> None:
    registry.on_event(beat("a"), 0.0)
    for turn in range(1, 20):
        registry.note_stall(1.5, 2.0 * turn)
        registry.sweep(2.0 * turn)
    assert told == ["a"]


def test_other_events_are_ignored(registry: Registry) -> None:
    registry.on_event(TokenBatch(InstanceId("a"), ()), 0.0)
    assert registry.all() == []


async def test_wait_ready_waits_for_the_first_one(registry: Registry) -> None:
    waiting = [asyncio.create_task(registry.wait_ready(30, role=role)) for role in ("decode", "decode", "encoder")]
    await asyncio.sleep(0)
    registry.on_event(beat("a", state="starting"), 0.0)
    registry.on_event(beat("a"), 0.1)
    assert names(await asyncio.wait_for(waiting[2], 5)) == ["a"]
    assert not waiting[0].done()
    registry.on_event(beat("d", roles=("decode",)), 0.2)
    assert [names(await asyncio.wait_for(task, 5)) for task in waiting[:2]] == [["d"], ["d"]]


async def test_wait_ready_gives_up(registry: Registry) -> None:
    assert await registry.wait_ready(0.01) == []


async def test_find_waits_for_an_instance_not_heard_of_yet(registry: Registry) -> None:
    """As a process that has just started is told of a peer before it got that peer's heartbeat."""
    waiting = asyncio.create_task(registry.find(InstanceId("a")))
    await asyncio.sleep(0)
    registry.on_event(beat("b"), 0.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.on_event(beat("a"), 0.0)
    assert await waiting == beat("a")
    assert await registry.find(InstanceId("a")) == beat("a")


async def test_find_ends_when_the_instance_has_ended(registry: Registry) -> None:
    waiting = asyncio.create_task(registry.find(InstanceId("a")))
    await asyncio.sleep(0)
    registry.on_event(lost("a"), 0.0)
    assert await asyncio.wait_for(waiting, TIMEOUT_S / 2) is None
    assert await registry.find(InstanceId("a")) is None


async def test_find_gives_up() -> None:
    assert await Registry(0.01).find(InstanceId("a")) is None
