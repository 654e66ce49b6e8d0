"""How many instances the local launcher has at most, whoever asks it for more."""

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
from triptych.shared.messages import Event, InstanceId, Launched, Lost, ScaleOutRequest


class Bus:
    """What the launcher uses of a bus."""

    hear: Callable[[Event], None]

    async def listen(self, subject: str, callback: Callable[[Event], None]) -> None:
        self.hear = callback

    async def publish_event(self, subject: str, event: Event) -> None:
        """Losses: not looked at here."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_there_are_never_more_than_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a scaler that does not know of all: one that was started again, or one of two."""
    bus, children = Bus(), dict[str, Child]()

    def slot(name: str, *_: str) -> Slot:
        log = ChildLog(name, tmp_path / name, logging.WARNING, lambda line: None)
        return Slot(name, lambda instance_id: ChildSpec(name, (instance_id,), {}), log)

    async def start_child(spec: ChildSpec, log: ChildLog) -> Any:
        children[spec.name] = Child(spec)
        return children[spec.name]

    async def more(kind: str) -> str:
        before = dict(children)
        reply = await launcher.handle(ScaleOutRequest(kind))
        assert isinstance(reply, Launched)
        await until(lambda: children.get(reply.name) is not before.get(reply.name))
        return reply.name

    monkeypatch.setattr(local.Child, "start", start_child)
    launcher = LocalLauncher(lambda slot, status: None, None, slot, max_instances=4)
    await launcher.use_bus(cast(Any, bus))
    for name in ("router-0", "encoder-0", "decode-0"):
        await launcher.start(slot(name))
    names = [await more("text"), await more("text")]
    children[names[0]].ended.set_result(-9)  # it is started again, as soon as somebody asks for it
    await until(lambda: names[0] not in launcher.pids())
    with pytest.raises(Overloaded, match="there are 4 instances, and there may be no more"):
        await launcher.handle(ScaleOutRequest("decode"))
    bus.hear(Lost(InstanceId(children[names[1]].spec.command[0]), names[1], 0, expected=True))
    children[names[1]].ended.set_result(0)
    assert await more("decode") == "decode-1"
    with pytest.raises(Overloaded):
        await launcher.handle(ScaleOutRequest("text"))
    await launcher.stop(launcher.names(), 1.0)
