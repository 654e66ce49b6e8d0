"""Sends one piece of a request's work to an instance of a stage: chooses it, waits for its reply, tries others when it refuses.

A wait ends with the reply, when the instance is lost, or at the request's deadline; the caller's cancellation ends it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from triptych.services.router.load_book import InstanceView, LoadBook
from triptych.services.router.record import Attempt, Stage, StageStamp
from triptych.shared.errors import UNREACHABLE, DeadlineExceeded, InstanceLost, Overloaded
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.policies.routing import Choice
from triptych.shared.registry import Registry

T = TypeVar("T")
FIRST_WAIT_S, MAX_WAIT_S = 0.02, 0.5  # chosen: pauses between rounds over instances that all refused, or none is there

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """num_tokens: what it adds to an instance's load, less what is cached there. send gives the stage's result; its arguments
    are the chosen instance and the choice. is_begun: a stage was at it already; it is not given up before its deadline."""

    stage: Stage
    num_tokens: int
    choose: Callable[[Sequence[InstanceView]], Choice | None]
    send: Callable[[Heartbeat, Choice], Coroutine[Any, Any, T]]
    is_begun: bool = False


class Dispatcher:
    """stage_wait_s: how long a request waits for a stage of which no instance is there, or all refuse."""

    def __init__(self, registry: Registry, book: LoadBook, stage_wait_s: float) -> None:
        self._registry = registry
        self._book = book
        self._stage_wait_s = stage_wait_s
        self._waiting: dict[InstanceId, set[asyncio.Timeout]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def has_ended(self, instance_id: InstanceId) -> bool:
        """Whether that instance is gone for good, and not only silent."""
        return self._registry.has_ended(instance_id)

    def on_lost(self, instance_id: InstanceId) -> None:
        """Wake whoever waits for that instance."""
        for wait in self._waiting.pop(instance_id, ()):
            if not wait.expired():
                wait.reschedule(0)  # the past

    async def dispatch(self, work: Work[T], attempt: Attempt, deadline_s: float) -> tuple[InstanceId, T]:
        """Who did it, and its result.

        Raises:
            InstanceLost: the chosen instance is gone.
            Overloaded: no instance is there, or all refuse, for stage_wait_s; DeadlineExceeded at deadline_s.
            TriptychError: what the instance answered.
        """
        stamp = StageStamp(work.stage, time.monotonic())
        attempt.stamps.append(stamp)
        give_up_at_s = deadline_s if work.is_begun else min(deadline_s, stamp.queued_at_s + self._stage_wait_s)
        refusals: dict[InstanceId, Overloaded] = {}
        wait_s = FIRST_WAIT_S
        while True:
            now_s = time.monotonic()
            choice = work.choose(self._book.views(work.stage, refusals))
            if choice is None:
                if now_s >= give_up_at_s:
                    raise self._unavailable(work.stage, refusals, now_s >= deadline_s)
                await asyncio.sleep(min(wait_s, give_up_at_s - now_s))
                wait_s = min(2 * wait_s, MAX_WAIT_S)
                refusals.clear()
                continue
            stamp.begin(choice.instance_id, choice.reason, now_s)
            _log.debug(
                "chosen", stage=work.stage, instance_id=choice.instance_id, reason=choice.reason, request_id=attempt.request_id
            )
            attempt.touched.add(choice.instance_id)
            if choice.pull_from is not None:
                attempt.touched.add(choice.pull_from)  # what is pulled is leased there
            try:
                result = await self._send(work, choice, deadline_s)
            except DeadlineExceeded:
                raise
            except Overloaded as error:
                refusals[choice.instance_id] = error
                continue
            except InstanceLost as error:
                if error.code == UNREACHABLE and error.instance_id == choice.instance_id:
                    continue  # it never began: this is no failed attempt, and the instance is left out from now on
                raise
            finally:
                stamp.end(time.monotonic())
            stamp.end(time.monotonic(), getattr(result, "time", None))
            return choice.instance_id, result

    async def _send(self, work: Work[T], choice: Choice, deadline_s: float) -> T:
        instance_id = choice.instance_id
        beat = self._registry.get(instance_id)
        if beat is None:
            raise InstanceLost("an instance of a stage is gone", instance_id=instance_id, code=UNREACHABLE)
        with self._book.hold(instance_id, work.stage, work.num_tokens - choice.num_cached_tokens):
            try:
                return await self._until_lost(instance_id, work.send(beat, choice), deadline_s)
            except InstanceLost as error:
                if error.instance_id == instance_id:
                    self._book.suspect(instance_id)
                raise

    async def _until_lost(self, instance_id: InstanceId, sending: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """In the caller's task: a stage's work is one message there and back, a task of its own would be a good part of it."""
        waits = self._waiting.setdefault(instance_id, set())
        wait = asyncio.timeout(max(0.0, deadline_s - time.monotonic()))
        try:
            async with wait:
                waits.add(wait)
                return await sending
        except TimeoutError:
            if not wait.expired():
                raise
            if self._waiting.get(instance_id) is not waits:
                raise InstanceLost("an instance of a stage was lost", instance_id=instance_id) from None
            raise DeadlineExceeded() from None
        finally:
            waits.discard(wait)
            if not waits and self._waiting.get(instance_id) is waits:
                del self._waiting[instance_id]

    def _unavailable(self, stage: Stage, refusals: dict[InstanceId, Overloaded], is_too_late: bool) -> Overloaded:
        if is_too_late:
            return DeadlineExceeded()
        if not refusals:
            return Overloaded(f"no {stage} instance is available; try again later", code="stage_unavailable")
        return Overloaded(f"every {stage} instance is busy; try again later")
