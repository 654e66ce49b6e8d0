"""The launcher's slots that many instances share: asked for by each, told of each, drained one by one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from support.fake_child import Child
from triptych.services.launcher import local
from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.local import LocalLauncher, Slot
from triptych.shared.errors import Overloaded
from triptych.shared.fleet import member_id
from triptych.shared.messages import Accepted, Event, InstanceId, LaunchRequest, Lost

NAMES = ("encoder-0", "decode-0")


class Bus:
    """What the launcher uses of a bus: told is all that it published."""

    def __init__(self) -> None:
        self.told: list[Lost] = []
        self.hear: Callable[[Event], None]

    async def listen(self, subject: str, callback: Callable[[Event], None]) -> None:
        self.hear = callback

    async def publish_event(self, subject: str, event: Event) -> None:
        self.told.append(cast(Lost, event))


class Run:
    """A launcher with one slot. may_start: processes take until then to be started."""

    def __init__(self, folder: Path) -> None:
        self.bus, self.children = Bus(), list[Child]()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.is_starting = False
        self.launcher = LocalLauncher(lambda slot, status: None)
        log = ChildLog("emulated-0", folder / "log", logging.WARNING, lambda line: None)
        self.slot = Slot("emulated-0", lambda _: ChildSpec("emulated-0", (), {}), log, instances=NAMES)

    async def start_child(self, spec: ChildSpec, log: ChildLog) -> Any:
        self.is_starting = True
        await self.may_start.wait()
        self.is_starting = False
        self.children.append(Child(spec))
        return self.children[-1]

    async def start(self) -> None:
        await self.launcher.use_bus(cast(Any, self.bus))
        await self.launcher.start(self.slot)

    def drain(self, name: str) -> None:
        assert self.slot.instance_id is not None
        self.bus.hear(Lost(member_id(name, self.slot.instance_id), name, 0, expected=True))


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path)
    monkeypatch.setattr(local.Child, "start", made.start_child)
    return made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_loss_is_told_of_each_instance(run: Run) -> None:
    await run.start()
    run.children[0].ended.set_result(-9)
    await until(lambda: len(run.bus.told) == 2)
    assert [(lost.name, lost.exit_code, lost.expected) for lost in run.bus.told] == [(name, -9, False) for name in NAMES]
    assert len({lost.instance_id.rpartition("-")[2] for lost in run.bus.told}) == 1
    await run.launcher.stop(["emulated-0"], 1.0)


async def test_asked_for_by_each_instance_it_is_started_once_and_its_next_loss_is_told(run: Run) -> None:
    await run.start()
    run.children[0].ended.set_result(-9)
    await until(lambda: len(run.bus.told) == 2)
    run.may_start.clear()
    assert await run.launcher.handle(LaunchRequest(NAMES[0])) == Accepted()
    await until(lambda: run.is_starting)
    with pytest.raises(Overloaded):  # so that whoever counts starts counts one
        await run.launcher.handle(LaunchRequest(NAMES[1]))
    run.may_start.set()
    await until(lambda: len(run.children) == 2)
    run.bus.told.clear()
    await until(lambda: run.slot.child is cast(Any, run.children[1]))
    run.children[1].ended.set_result(-9)
    await until(lambda: len(run.bus.told) == 2)
    assert len(run.children) == 2, "nobody has asked for a third"
    await run.launcher.stop(["emulated-0"], 1.0)


async def test_a_process_all_of_whose_instances_were_drained_stays_ended(run: Run) -> None:
    await run.start()
    for name in NAMES:
        run.drain(name)
    run.children[0].ended.set_result(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert run.bus.told == []
    await run.launcher.stop(["emulated-0"], 1.0)


async def test_a_process_some_of_whose_instances_were_drained_is_told_of(run: Run) -> None:
    await run.start()
    run.drain(NAMES[0])
    run.children[0].ended.set_result(-9)
    await until(
        lambda: (
            InstanceId(member_id(NAMES[1], cast(InstanceId, run.slot.instance_id)))
            in {lost.instance_id for lost in run.bus.told}
        )
    )
    await run.launcher.stop(["emulated-0"], 1.0)
