"""Which roles an instance has, and which of those that it had still have requests at hand. Used by instance.py.

A role that is taken away takes nothing new at once; what it is at goes on, elsewhere where the role can see to that. Given back
before that has ended it takes new requests again, as if nothing had been. Weights, KV and leases are the instance's, not a
role's: nothing is loaded, copied or forgotten. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from triptych.shared.engine.role import StageRole
from triptych.shared.messages import Role

IDLE_POLL_S = 0.02  # chosen: how often a role that was taken away looks whether it is idle


class RoleSet:
    """make: a new role, not started."""

    def __init__(self, make: Callable[[Role], StageRole]) -> None:
        self._make = make
        self._active: dict[Role, StageRole] = {}
        self._leaving: dict[Role, StageRole] = {}
        self._endings: dict[Role, asyncio.Task[None]] = {}
        self._one_switch = asyncio.Lock()

    @property
    def names(self) -> tuple[Role, ...]:
        """Of those that take work."""
        return tuple(self._active)

    def all(self) -> list[StageRole]:
        """Those that leave, too."""
        return [*self._active.values(), *self._leaving.values()]

    def get(self, name: Role) -> StageRole | None:
        """One that takes work, or did a moment ago and refuses by itself."""
        return self._active.get(name) or self._leaving.get(name)

    def is_idle(self) -> bool:
        return all(role.is_idle() for role in self.all())

    async def switch(self, names: Collection[Role], timeout_s: float) -> None:
        """Have these roles and no others; returns when they take work. What the others are at is given up after timeout_s."""
        async with self._one_switch:
            for name in names:
                if name not in self._active:
                    self._active[name] = await self._begin(name)
            for name in self.names:
                if name not in names:
                    self._dismiss(name, timeout_s)

    def close_intakes(self) -> None:
        """The instance drains."""
        for role in self._active.values():
            role.close_intake()

    async def stop(self) -> None:
        """End all roles, whatever they are at, those that are being begun, too."""
        async with self._one_switch:
            roles = self.all()
            for name in self._leaving:
                self._endings[name].cancel()  # it only waits
            self._active, self._leaving = {}, {}
            if self._endings:
                await asyncio.wait(self._endings.values())
            for role in roles:
                await role.stop()

    async def _begin(self, name: Role) -> StageRole:
        role, ending = self._leaving.pop(name, None), self._endings.get(name)
        if ending is not None:
            if role is not None:
                ending.cancel()  # it only waits
            await asyncio.wait([ending])
        if role is None:
            role = self._make(name)
            await role.start()
        else:
            role.open_intake()
        return role

    def _dismiss(self, name: Role, timeout_s: float) -> None:
        role = self._leaving[name] = self._active.pop(name)
        role.close_intake()
        self._endings[name] = asyncio.create_task(self._end(name, role, timeout_s), name=f"end of role {name}")

    async def _end(self, name: Role, role: StageRole, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not role.is_idle():  # noqa: ASYNC110 - a role tells no event
                    await asyncio.sleep(IDLE_POLL_S)
        del self._leaving[name]
        await role.stop()
