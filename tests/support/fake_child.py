"""A launcher's child process that is none."""

from __future__ import annotations

import asyncio

from triptych.services.launcher.child import ChildSpec


class Child:
    """A process that ends when the test says so."""

    pid = 1

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def is_running(self) -> bool:
        return not self.ended.done()

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, timeout_s: float) -> None:
        if self.is_running:
            self.ended.set_result(0)
