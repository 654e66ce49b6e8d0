"""One attempt's way to the instances of the stages, for picture_stages.py and text_stages.py: choose one, ask it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

from triptych.services.router.dispatch import Work
from triptych.services.router.job import Parts
from triptych.services.router.record import Attempt, RequestRecord
from triptych.services.router.routing import Routes
from triptych.services.router.sampling_fields import Terms
from triptych.shared.errors import InternalError
from triptych.shared.messages import InstanceId, Message, RequestId, Role

T = TypeVar("T")
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class StageCalls:
    """Every call ends at the request's deadline."""

    parts: Parts
    record: RequestRecord
    attempt: Attempt
    routes: Routes
    terms: Terms

    @property
    def request_id(self) -> RequestId:
        """The attempt's own."""
        return self.attempt.request_id

    def remaining_s(self) -> float:
        return self.record.remaining_s(time.monotonic())

    @property
    def kv_may_be_elsewhere(self) -> bool:
        """Whether the KV of a prompt may be at another instance than it would go to, and of use there."""
        return "prefill" not in self.parts.routing.policies.routing.coupled and self.parts.book.num_with_kv > 1

    def may_use(self, stage: Role, instance_id: InstanceId) -> bool:
        """Whether what is cached there is of use to a stage."""
        return self.parts.book.is_ready(instance_id) and self.routes.may_be_at(stage, instance_id)

    def slack_s(self) -> float | None:
        """Until the first token is due; None: there is no such target."""
        return self.record.slack_s(time.monotonic())

    async def dispatch(self, work: Work[T]) -> tuple[InstanceId, T]:
        """Who did it, and its result. Raises as `Dispatcher.dispatch` does."""
        instance_id, result = await self.parts.dispatcher.dispatch(work, self.attempt, self.record.deadline_s)
        self.routes.bind(instance_id)
        return instance_id, result

    async def ask(self, instance_id: InstanceId, request: Message, expected: type[R]) -> R:
        """The answer of the chosen instance. Raises as `Bus.request` does."""
        reply = await self.parts.bus.request(instance_id, request, self.remaining_s())
        if not isinstance(reply, expected):
            raise InternalError("a stage answered with a message of another kind")
        return reply
