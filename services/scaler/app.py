"""The scaler: watches heartbeats, decides about roles and instances (controller.py), has local processes that ended started
again (restarts.py), and answers what the cluster looks like and why it does.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import structlog
from fastapi import FastAPI, Query, Response

from triptych.services.scaler.controller import Controller
from triptych.services.scaler.decision_log import CAPACITY
from triptych.services.scaler.elastic_settings import check_elastic, known_costs
from triptych.services.scaler.restarts import Restarts
from triptych.shared.errors import InternalError
from triptych.shared.messages import LOST_SUBJECT, InstanceId, InstanceRequest, Message, Service, StatusReply, StatusRequest
from triptych.shared.policies.elastic.strategy import Elasticity, Fixed
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.service import Report, ServiceApp, ServiceContext
from triptych.shared.settings import Settings

NUM_TOLD = 50  # chosen: decisions, unless asked for more

_log = structlog.get_logger(__name__)


class Scaler:
    """One per cluster. strategy: None for what the settings say."""

    service: Service = "scaler"

    def __init__(self, settings: Settings, strategy: Elasticity | None = None) -> None:
        self.app = FastAPI(title="Triptych scaler", openapi_url=None)
        self.app.get("/v1/decisions")(self._tell_decisions)
        self._settings = settings
        self._strategy = strategy
        self._context: ServiceContext
        self._restarts: Restarts
        self._controller: Controller
        self._controlling: asyncio.Task[None] | None = None

    async def start(self, context: ServiceContext) -> None:
        """Raises BadRequest: the settings for elasticity contradict each other."""
        settings = self._settings
        check_elastic(settings)
        strategy = self._strategy or policy_set(settings.policy).elasticity
        self._context = context
        self._restarts = Restarts(context)
        await context.bus.listen(LOST_SUBJECT, self._restarts.on_event)
        self._controller = Controller(context, Fixed() if settings.elastic == "off" else strategy, known_costs(settings))
        self._controlling = asyncio.create_task(self._controller.run(), name="controller")
        self._controlling.add_done_callback(self._on_controller_end)

    async def handle(self, request: InstanceRequest) -> Message | None:
        if not isinstance(request, StatusRequest):
            raise InternalError(f"the scaler has no use for a {type(request).__name__}", code="invalid_message")
        beats = (beat for beat in self._context.registry.all() if beat.service != "launcher")
        return StatusReply(tuple(beats), self._restarts.count)

    async def _tell_decisions(self, limit: Annotated[int, Query(ge=1, le=CAPACITY)] = NUM_TOLD) -> Response:
        """The last ones: why the cluster is as it is."""
        return Response(msgspec.json.encode(self._controller.decisions(limit)), media_type="application/json")

    def _on_controller_end(self, task: asyncio.Task[None]) -> None:
        """By itself it ends by a bug only: started again, the scaler begins anew."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the controller failed", exc_info=error)
            self._context.lifecycle.give_up()

    def report(self) -> Report:
        return Report()

    def on_router_lost(self, router_id: InstanceId) -> None:
        """The scaler holds nothing of requests."""

    def is_idle(self) -> bool:
        return True

    async def stop(self) -> None:
        if self._controlling is not None:
            self._controlling.cancel()
            self._restarts.stop()


def make_service(settings: Settings) -> ServiceApp:
    """The scaler of a cluster."""
    return Scaler(settings)
