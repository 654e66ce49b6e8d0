"""The instance host: one process with one engine, one KV pool, one tensor transport, and any subset of the engine roles
(encoder, prefill, decode) on top. It owns what outlives a role; the roles own only their queues.

The only module that imports the roles. Torch and the weights are loaded on the engine thread, off the event loop; an emulated
instance has neither.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import time
from collections.abc import Callable, Sequence

import structlog
from fastapi import FastAPI

from triptych.services.decode.role import DecodeRole
from triptych.services.emulated_host import check_switch, open_emulated_host
from triptych.services.encoder.role import EncoderRole
from triptych.services.host_context import HostContext
from triptych.services.instance_parts import integrity_error, model_card_of, resources_of
from triptych.services.prefill.role import PrefillRole
from triptych.services.role_set import RoleSet
from triptych.shared.engine.emulated_calls import EmulatedCalls
from triptych.shared.engine.role import StageRole
from triptych.shared.engine.thread import EngineCalls, EngineThread
from triptych.shared.errors import InternalError, Overloaded
from triptych.shared.messages import (
    Accepted,
    BlocksRequest,
    DecodeRequest,
    EmbeddingsReady,
    EncodeRequest,
    HandOverRequest,
    InstanceId,
    InstanceRequest,
    Message,
    PairRequest,
    PrefillRequest,
    PullDone,
    PullRequest,
    ReleaseRequest,
    RequestId,
    Role,
    Service,
    SwitchReply,
    SwitchRequest,
)
from triptych.shared.policies.groups import Group
from triptych.shared.request_tasks import RequestTasks
from triptych.shared.service import Report, ServiceApp, ServiceContext
from triptych.shared.settings import Settings

HOUSEKEEPING_S = 0.5  # chosen: how soon after turning idle the block counts are checked
CHECK_INTERVAL_S = 5.0  # chosen: the check takes milliseconds of Python with 30 000 blocks

_ROLE_OF: dict[type[Message], Role] = {EncodeRequest: "encoder", PrefillRequest: "prefill", DecodeRequest: "decode"}
_log = structlog.get_logger(__name__)


def make_service(settings: Settings, roles: Sequence[Role]) -> ServiceApp:
    """An instance with these roles."""
    return InstanceService(settings, tuple(roles))


def num_threads(settings: Settings) -> int:
    """Torch threads of one instance, when all others compute, too. The command line has set OMP_NUM_THREADS, by the same rule,
    before torch is loaded."""
    return settings.threads or int(os.environ.get("OMP_NUM_THREADS") or 1)


class InstanceService:
    """Implements ServiceApp."""

    service: Service = "instance"

    def __init__(self, settings: Settings, roles: tuple[Role, ...]) -> None:
        self.app = FastAPI(title="Triptych instance")
        self._settings = settings
        self._initial_roles = roles
        self._emulated = EmulatedCalls(settings.time_scale) if settings.emulate else None
        self._thread: EngineCalls = self._emulated or EngineThread()
        self._tasks = RequestTasks()
        self._group: Group = settings.group
        self._names: tuple[Role, ...] = ()
        self._takes_follow_ups = False
        self._roles = RoleSet(lambda role: _make_role(role, self._context))
        self._frame: ServiceContext
        self._context: HostContext
        self._housekeeping: list[asyncio.Task[None]] = []
        self._num_handled = 0
        self._num_handled_when_checked = 0

    async def start(self, context: ServiceContext) -> None:
        """Load the model, open the transport, start the roles.

        Raises:
            BadRequest: the checkpoint or the settings can't be served.
        """
        self._frame = context
        self._tasks.has_ended = context.registry.has_ended
        self._context = await self._open()
        self._context.metrics.is_checked.set_function(lambda: self._num_handled == self._num_handled_when_checked)
        await self._have_roles(self._initial_roles, 0.0)
        for work in (self._keep_house(), self._close_when_draining()):
            self._housekeeping.append(asyncio.create_task(work, name="instance housekeeping"))

    async def _open(self) -> HostContext:
        if self._emulated is not None:
            return await open_emulated_host(self._frame, self._emulated, self._initial_roles, self._tasks)
        # Torch takes seconds to import: on the engine thread that blocks nobody. Later imports of it are look-ups.
        await self._thread.run(importlib.import_module, "triptych.services.engine_host")
        from triptych.services.engine_host import open_engine, open_host, share_cores

        engine = await self._thread.run(open_engine, self._settings, num_threads(self._settings))
        if isinstance(self._thread, EngineThread) and not self._settings.threads and self._settings.device == "cpu":
            share_cores(engine, self._thread, self._settings.cores_file, num_threads(self._settings))
        return await open_host(self._frame, engine, self._thread, self._tasks)

    async def handle(self, request: InstanceRequest) -> Message | None:
        """A request that came over the bus."""
        match request:
            case EncodeRequest() | PrefillRequest() | DecodeRequest():
                return await self._work(request)
            case EmbeddingsReady():
                return await self._role("prefill").handle(request)
            case BlocksRequest():
                self._tasks.note(request.request_id, request.router_id)
                self._num_handled += 1
                return await self._context.prefixes.lease(request)
            case PullRequest():
                return await self._context.transport.on_pull(request)
            case PairRequest():
                return await self._context.transport.on_pair(request)
            case PullDone():
                self._context.transport.on_pull_done(request)
            case ReleaseRequest():
                self._release(request.request_id)
            case SwitchRequest():
                return await self._switch(request)
            case HandOverRequest():
                decode = self._role("decode")
                assert isinstance(decode, DecodeRole)
                if self._context.has_peer("decode"):  # nor later, when there is one
                    decode.hand_over(math.inf if request.num_tokens is None else request.num_tokens)
                return Accepted()
            case _:
                raise InternalError(f"an instance has no use for a {type(request).__name__}", code="invalid_message")
        return None

    async def _work(self, request: EncodeRequest | PrefillRequest | DecodeRequest) -> Message:
        role = self._role(_ROLE_OF[type(request)])
        self._num_handled += 1
        with self._tasks.track(request.request_id, request.router_id):
            try:
                return await role.handle(request)
            finally:
                if self._tasks.is_released(request.request_id):  # what the handler stored in its last moment
                    self._context.transport.release_request(request.request_id)

    async def _switch(self, request: SwitchRequest) -> SwitchReply:
        """Weights of the vision tower and of the language model are here whatever the roles are: nothing is loaded."""
        began_s = time.monotonic()
        if self._frame.is_draining:
            raise _no_such_work()
        if self._emulated is not None:
            check_switch(self._settings, self._initial_roles, request.roles)
        await self._have_roles(request.roles, request.timeout_s)
        if self._frame.is_draining:  # since a moment ago
            self._roles.close_intakes()
        self._group = request.group
        await self._frame.announce()
        seconds = time.monotonic() - began_s
        _log.info("roles switched", roles=request.roles, group=request.group, seconds=round(seconds, 4))
        return SwitchReply(seconds)

    async def _have_roles(self, names: tuple[Role, ...], timeout_s: float) -> None:
        """Who only decodes also computes the end of prompts of which most is here; the prefill role is not told of then."""
        max_tokens = self._context.policies.routing.follow_ups.max_tokens
        is_host = max_tokens > 0 and "prefill" not in names and "decode" in names and not self._context.engine.attends_to_all
        await self._roles.switch((*names, "prefill") if is_host else names, timeout_s)
        self._names, self._takes_follow_ups = names, is_host
        prefill = self._roles.get("prefill")
        if isinstance(prefill, PrefillRole):
            prefill.take_at_most(max_tokens if is_host else None)

    def _role(self, name: Role) -> StageRole:
        role = self._roles.get(name)
        if role is None:
            raise _no_such_work()
        return role

    def _release(self, request_id: RequestId) -> None:
        self._tasks.cancel(request_id)
        self._context.transport.release_request(request_id)

    def on_router_lost(self, router_id: InstanceId) -> None:
        """Free everything that this router's requests hold."""
        for request_id in self._tasks.cancel_router(router_id):
            self._release(request_id)

    def is_idle(self) -> bool:
        """Nothing waits or runs, and nobody has to pull anything any more."""
        is_at_rest = self._tasks.num_running == 0 and self._roles.is_idle()
        return is_at_rest and self._context.transport.usage()[2] == 0

    def report(self) -> Report:
        """This instance's part of its heartbeat."""
        return Report(
            loads=tuple(role.load() for role in self._roles.all()),
            resources=resources_of(self._context),
            roles=self._names,
            model=model_card_of(self._context),
            transport=self._context.transport.address,
            group=self._group,
            takes_follow_ups=self._takes_follow_ups,
        )

    async def stop(self) -> None:
        """End all tasks, close the transport, wait for the engine's last call."""
        if self._housekeeping:
            for task in self._housekeeping:
                task.cancel()
            await asyncio.gather(*self._housekeeping, return_exceptions=True)
            await self._roles.stop()
            await self._context.transport.close()
            await self._context.index.close()
        await asyncio.to_thread(self._thread.close)

    async def _close_when_draining(self) -> None:
        """A draining instance takes nothing new, and hands over what others can go on with."""
        await self._frame.lifecycle.drain_asked.wait()
        self._roles.close_intakes()

    async def _keep_house(self) -> None:
        """Each time the instance turned idle, check that all its blocks are accounted for."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if self._num_handled != self._num_handled_when_checked and self.is_idle():
                await self._check_integrity()
                await asyncio.sleep(CHECK_INTERVAL_S - HOUSEKEEPING_S)

    async def _check_integrity(self) -> None:
        """In a thread, since it takes long; void when work came meanwhile."""
        num_handled = self._num_handled
        error = await asyncio.to_thread(integrity_error, self._context)
        if self._num_handled != num_handled:
            return
        self._num_handled_when_checked = num_handled
        if error is not None:
            self._context.metrics.integrity_failures.inc()
            _log.error("KV blocks are unaccounted for", error=error)


def _no_such_work() -> Overloaded:
    return Overloaded("this instance takes no such work", code="stage_unavailable")


def _make_role(role: Role, context: HostContext) -> StageRole:
    makers: dict[Role, Callable[[HostContext], StageRole]] = {
        "encoder": EncoderRole,
        "prefill": PrefillRole,
        "decode": DecodeRole,
    }
    return makers[role](context)
