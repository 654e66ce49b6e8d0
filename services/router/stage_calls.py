"""One attempt's way to the instances of the stages, for picture_stages.py and text_stages.py: choose one, ask it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

from triptych.services.router.dispatch import Work
from triptych.services.router.job import Parts
from triptych.services.router.record import Attempt, RequestRecord
from triptych.shared.errors import InternalError
from triptych.shared.messages import Heartbeat, InstanceId, Message, RequestId

T = TypeVar("T")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class StageCalls:
    """Every call ends at the request's deadline."""

    parts: Parts
    record: RequestRecord
    attempt: Attempt

    @property
    def request_id(self) -> RequestId:
        """The attempt's own."""
        return self.attempt.request_id

    def remaining_s(self) -> float:
        return self.record.remaining_s(time.monotonic())

    async def dispatch(self, work: Work[T]) -> tuple[InstanceId, T]:
        """Who did it, and its result. Raises as `Dispatcher.dispatch` does."""
        return await self.parts.dispatcher.dispatch(work, self.attempt, self.record.deadline_s)

    async def ask(self, beat: Heartbeat, request: Message, expected: type[R]) -> R:
        """The answer of the chosen instance. Raises as `Bus.request` does."""
        reply = await self.parts.bus.request(beat.instance_id, request, self.remaining_s())
        if not isinstance(reply, expected):
            raise InternalError("a stage answered with a message of another kind")
        return reply
