"""Which roles an instance has, one switch after the other: nothing is refused that need not be, nothing stays."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from support.fake_cluster import until
from triptych.services.role_set import RoleSet
from triptych.shared.messages import Role


class FakeRole:
    """Of StageRole what a RoleSet asks for."""

    def __init__(self, log: list[str], name: Role) -> None:
        self.log, self.name = log, name
        self.idle = True
        self.may_start, self.may_stop = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_stop.set()

    def note(self, what: str) -> None:
        self.log.append(f"{self.name} {what}")

    async def start(self) -> None:
        self.note("starts")
        await self.may_start.wait()

    def open_intake(self) -> None:
        self.note("opens")

    def close_intake(self) -> None:
        self.note("closes")

    def is_idle(self) -> bool:
        return self.idle

    async def stop(self) -> None:
        self.note("ends")
        await self.may_stop.wait()


def start() -> tuple[RoleSet, list[str]]:
    log: list[str] = []
    return RoleSet(lambda name: cast(Any, FakeRole(log, name))), log


def role_of(roles: RoleSet, name: Role) -> FakeRole:
    return cast(FakeRole, roles.get(name))


async def test_new_roles_work_before_others_end() -> None:
    roles, log = start()
    await roles.switch(("decode",), 1.0)
    await roles.switch(("encoder", "prefill"), 1.0)
    assert roles.names == ("encoder", "prefill")
    await until(lambda: len(roles.all()) == 2, "decode has ended")
    assert log == ["decode starts", "encoder starts", "prefill starts", "decode closes", "decode ends"]
    await roles.stop()


async def test_a_role_that_is_given_back_goes_on() -> None:
    roles, log = start()
    await roles.switch(("decode",), 1.0)
    decode = role_of(roles, "decode")
    decode.idle = False
    await roles.switch((), 60.0)
    assert (roles.names, roles.get("decode")) == ((), decode), "those that ask are told no by the role"
    await roles.switch(("decode",), 1.0)
    assert roles.get("decode") is decode
    assert log == ["decode starts", "decode closes", "decode opens"]
    await roles.stop()
    assert log[-1] == "decode ends"


async def test_one_that_is_ending_ends_before_a_new_one_begins() -> None:
    roles, log = start()
    await roles.switch(("decode",), 1.0)
    role_of(roles, "decode").may_stop.clear()
    ending = role_of(roles, "decode")
    await roles.switch((), 1.0)
    await until(lambda: log[-1] == "decode ends", "it ends")
    switching = asyncio.create_task(roles.switch(("decode",), 1.0))
    await asyncio.sleep(0)
    assert not switching.done()
    ending.may_stop.set()
    await switching
    assert roles.get("decode") is not ending
    assert log == ["decode starts", "decode closes", "decode ends", "decode starts"]
    await roles.stop()


async def test_work_that_lasts_is_given_up_in_the_end() -> None:
    roles, log = start()
    await roles.switch(("decode", "prefill"), 1.0)
    role_of(roles, "decode").idle = role_of(roles, "prefill").idle = False
    await roles.switch((), 0.0)
    await until(lambda: log[-2:] == ["decode ends", "prefill ends"], "both end")
    assert not roles.all()
    await roles.stop()


async def test_the_end_of_the_process_waits_for_nobody() -> None:
    roles, log = start()
    await roles.switch(("decode", "prefill"), 1.0)
    role_of(roles, "decode").idle = role_of(roles, "prefill").idle = False
    await roles.switch(("prefill",), 600.0)
    async with asyncio.timeout(5):
        await roles.stop()
    assert sorted(log[-2:]) == ["decode ends", "prefill ends"]
    assert roles.is_idle()


async def test_a_role_that_begins_as_all_end_ends_with_them() -> None:
    log: list[str] = []
    begun = FakeRole(log, "prefill")
    begun.may_start.clear()
    roles = RoleSet(lambda name: cast(Any, begun))
    switching = asyncio.create_task(roles.switch(("prefill",), 1.0))
    await until(lambda: log == ["prefill starts"], "it begins")
    stopping = asyncio.create_task(roles.stop())
    await asyncio.sleep(0)
    begun.may_start.set()
    await asyncio.gather(switching, stopping)
    assert (log, roles.all()) == (["prefill starts", "prefill ends"], [])
