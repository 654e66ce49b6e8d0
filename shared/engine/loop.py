"""A role's step loop: one task that steps while there is work and sleeps until woken. Used by the engine roles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

ERROR_PAUSE_S = 0.05  # chosen: a step that always fails must not take the event loop for itself

_log = structlog.get_logger(__name__)


class StepLoop:
    """Owns the task.

    Args:
        name: for the log and the task.
        step: does one step; False when there was nothing to do.
        on_error: called when a step raised, which is a bug of ours: must drop what the step worked on, so that the next
            step does not meet it again.

    is_stepping: a step is under way; the engine may use blocks of requests that are gone already.
    """

    def __init__(self, name: str, step: Callable[[], Awaitable[bool]], on_error: Callable[[Exception], None]) -> None:
        self._name = name
        self._step = step
        self._on_error = on_error
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_stepping = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"{self._name} loop")

    def wake(self) -> None:
        """Something changed: look for work again."""
        self._woken.set()

    async def stop(self) -> None:
        """Cancel the task and wait for it; a step on the engine thread ends first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            if not await self._step_once():
                await self._woken.wait()

    async def _step_once(self) -> bool:
        """Whatever the step or on_error raise, the loop goes on: without it the instance would take work and never do it."""
        self.is_stepping = True
        try:
            return await self._step()
        except Exception as error:
            _log.exception("a step failed", role=self._name)
            self._drop_after(error)
        finally:
            self.is_stepping = False
        await asyncio.sleep(ERROR_PAUSE_S)
        return True

    def _drop_after(self, error: Exception) -> None:
        try:
            self._on_error(error)
        except Exception:
            _log.exception("could not drop the work of a failed step", role=self._name)
