"""One instance more by the local launcher: names, slots that are used again, bounds."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from support.fake_child import Child
from triptych.services.launcher import local
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.shared.errors import BadRequest, Overloaded
from triptych.shared.messages import Event, InstanceId, Launched, LaunchRequest, Lost, Message, ScaleOutRequest


class Bus:
    """What the launcher uses of a bus. asked: requests, and of whom; each is answered by one more name."""

    hear: Callable[[Event], None]

    def __init__(self) -> None:
        self.asked: list[tuple[InstanceId, Message]] = []

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Message:
        self.asked.append((instance_id, message))
        return Launched(f"text-{len(self.asked) + 1}")

    async def listen(self, subject: str, callback: Callable[[Event], None]) -> None:
        self.hear = callback

    async def publish_event(self, subject: str, event: Event) -> None:
        """Losses are looked at in the launcher's other tests."""


class Run:
    """A launcher with one emulated process of three instances at first. children: processes by slot name, the last of each."""

    def __init__(self, folder: Path) -> None:
        self.bus, self.children = Bus(), dict[str, Child]()
        self._folder = folder
        self.launcher = LocalLauncher(lambda slot, status: None, make_slot=lambda name, _, group: self.slot(name, group))

    def slot(self, name: str, group: str = "", instances: tuple[str, ...] = (), takes_more: bool = False) -> Slot:
        log = ChildLog(name, self._folder / name, logging.WARNING, lambda line: None)
        make_spec = functools.partial(self._spec, name, group)
        return Slot(name, make_spec, log, instances=instances, takes_more=takes_more)

    def _spec(self, name: str, group: str, instance_id: InstanceId) -> ChildSpec:
        return ChildSpec(name, (instance_id, group), {})

    async def start_child(self, spec: ChildSpec, log: ChildLog) -> Any:
        self.children[spec.name] = Child(spec)
        return self.children[spec.name]

    async def more(self, kind: str, group: str = "") -> str:
        """The new slot's name, once its process was started."""
        before = dict(self.children)
        reply = await self.launcher.handle(ScaleOutRequest(kind, group))
        assert isinstance(reply, Launched)
        await until(lambda: self.children.get(reply.name) is not before.get(reply.name))
        return reply.name

    def drain(self, name: str) -> None:
        child = self.children[name]
        self.bus.hear(Lost(InstanceId(child.spec.command[0]), name, 0, expected=True))
        child.ended.set_result(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    monkeypatch.setattr(local.Child, "start", made.start_child)
    await made.launcher.use_bus(cast(Any, made.bus))
    await made.launcher.start(made.slot("emulated-0", instances=("text-0", "text-1", "decode-0")))
    yield made
    await made.launcher.stop(made.launcher.names(), 1.0)


async def test_names_that_nobody_has(run: Run) -> None:
    assert [await run.more("text", "text"), await run.more("decode"), await run.more("text")] == [
        "text-2",
        "decode-1",
        "text-3",
    ]
    assert run.children["text-2"].spec.command[1] == "text"
    assert set(run.launcher.pids()) == {"emulated-0", "text-2", "text-3", "decode-1"}


async def test_a_drained_slot_is_used_again_with_its_new_group(run: Run) -> None:
    assert await run.more("text") == "text-2"
    assert await run.more("text") == "text-3"
    run.drain("text-2")
    await until(lambda: "text-2" not in run.launcher.pids())
    assert await run.more("text", "multimodal") == "text-2"
    assert run.children["text-2"].spec.command[1] == "multimodal"
    assert await run.more("text") == "text-4"


async def test_a_crashed_slot_is_its_own_and_waits_for_its_restart(run: Run) -> None:
    assert await run.more("text") == "text-2"
    run.children["text-2"].ended.set_result(-9)
    await until(lambda: "text-2" not in run.launcher.pids())
    assert await run.more("text") == "text-3"


async def test_a_process_that_takes_more_is_asked(run: Run) -> None:
    slot = run.slot("fleet-0", instances=("text-0", "text-1"), takes_more=True)
    await run.launcher.start(slot)
    before = set(run.launcher.pids())
    assert await run.launcher.handle(ScaleOutRequest("text", "text")) == Launched("text-2")
    assert await run.launcher.handle(ScaleOutRequest("text")) == Launched("text-3")
    assert slot.instance_id is not None
    assert run.bus.asked == [(slot.instance_id, ScaleOutRequest("text", "text")), (slot.instance_id, ScaleOutRequest("text"))]
    assert set(run.launcher.pids()) == before, "no other process"
    assert set(slot.ids()) == {"text-0", "text-1", "text-2", "text-3"}, "whom its end is told of"
    run.bus.hear(Lost(slot.ids()["text-2"], "text-2", 0, expected=True))
    assert set(slot.ids()) == {"text-0", "text-1", "text-3"}, "that one is gone"
    run.children["fleet-0"].ended.set_result(-9)
    await until(lambda: "fleet-0" not in run.launcher.pids())
    await run.launcher.handle(LaunchRequest("text-3"))
    await until(lambda: "fleet-0" in run.launcher.pids())
    assert set(slot.ids()) == {"text-0", "text-1"}, "what was added does not come back"


async def test_bounds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest):
        await run.launcher.handle(ScaleOutRequest("router"))
    monkeypatch.setattr(local, "MAX_LAUNCHED", 3)
    assert await run.more("text") == "text-2"
    with pytest.raises(Overloaded):
        await run.launcher.handle(ScaleOutRequest("text"))
    with pytest.raises(Overloaded):
        await LocalLauncher(lambda slot, status: None).handle(ScaleOutRequest("text"))
