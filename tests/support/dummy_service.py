"""A service without a stage, run as a process: `python dummy_service.py SERVICE NAME [INSTANCE_ID]`.

Settings come from the environment. It prints what its frame tells it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import cast

from fastapi import FastAPI

from triptych.shared.errors import BadRequest
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import Accepted, InstanceId, InstanceRequest, LaunchRequest, Message, Service
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.service import Report, ServiceApp, ServiceContext, run_service
from triptych.shared.settings import Settings, load_settings


class Dummy:
    """LaunchRequest(name="1.5") makes it busy for 1.5 seconds, "-1" makes it give up. The slot name `broken` never starts, and
    `slow` is always about to. Its roles are those of its name's kind, an encoder's where that is none."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = FastAPI()
        self._busy_until_s = 0.0
        self._context: ServiceContext

    async def start(self, context: ServiceContext) -> None:
        if context.name == "broken":
            raise BadRequest("this one never starts", code="broken")
        if context.name == "slow":
            await asyncio.Event().wait()
        self._context = context
        say("starting")

    async def handle(self, request: InstanceRequest) -> Message | None:
        if isinstance(request, LaunchRequest):
            self._busy_until_s = time.monotonic() + float(request.name)
            if float(request.name) < 0:
                self._context.lifecycle.give_up()
        return Accepted()

    def report(self) -> Report:
        load = StageLoad("dummy", num_running=int(not self.is_idle()))
        kind = self._context.name.rpartition("-")[0]
        return Report(loads=(load,), roles=ROLES_OF.get(kind, ("encoder",)), group=self._context.settings.group)

    def on_router_lost(self, router_id: InstanceId) -> None:
        say(f"router lost {router_id}")

    def is_idle(self) -> bool:
        return time.monotonic() > self._busy_until_s

    async def stop(self) -> None:
        await asyncio.sleep(0)
        say("stopped")


def say(text: str) -> None:
    print(text, flush=True)


def make(settings: Settings) -> ServiceApp:
    return Dummy(cast(Service, os.environ["DUMMY_SERVICE"]))


if __name__ == "__main__":
    os.environ["DUMMY_SERVICE"] = sys.argv[1]
    given_id = InstanceId(sys.argv[3]) if len(sys.argv) > 3 else None
    sys.exit(run_service(sys.argv[2], load_settings(), make, given_id))
