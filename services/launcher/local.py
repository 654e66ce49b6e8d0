"""Keeps local processes running: starts them, tells the bus when one ends, starts it again.

Servers (NATS, Valkey) and the scaler are started again by itself; a stage only when the scaler asks (LaunchRequest), whom it
tells of the loss every second until then. One that was drained (DrainRequest) is not told of: it stays ended, until the scaler
asks for one instance more (ScaleOutRequest). Emulated instances share a process: that starts one more.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from triptych.services.launcher.child import Child, ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.template import NoTemplateError, Template
from triptych.shared.bus import Bus
from triptych.shared.errors import BadRequest, InternalError, Overloaded
from triptych.shared.fleet import member_id
from triptych.shared.messages import (
    LOST_SUBJECT,
    Accepted,
    Event,
    InstanceId,
    InstanceRequest,
    Launched,
    LaunchRequest,
    Lost,
    Message,
    ScaleOutRequest,
)
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.policies.restart import decide_restart
from triptych.shared.service_app import new_instance_id

TELL_INTERVAL_S = 1.0  # chosen: how often an unrepaired loss is told again
NUM_CRASHES_KEPT = 32  # chosen: more than the policy looks at
NUM_DRAINED_KEPT = 1024  # chosen: instances that said that they were drained; each is looked for soon after
ADD_TIMEOUT_S = 4.0  # chosen: less than the scaler waits for us (ASK_TIMEOUT_S)
MAX_LAUNCHED = 64  # chosen: processes of one kind; a policy gone wild must not fork hundreds

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Slot:
    """A place for one process at a time. make_spec: what to start, given the new incarnation's id. is_own: the launcher
    starts it again by itself. instances: the names under which the process appears, its own alone if empty. takes_more: the
    process starts more instances itself, and added are those that it has: they are gone with it."""

    name: str
    make_spec: Callable[[InstanceId], ChildSpec]
    log: ChildLog
    is_own: bool = False
    instances: tuple[str, ...] = ()
    takes_more: bool = False
    added: list[str] = field(default_factory=list)
    child: Child | None = None
    instance_id: InstanceId | None = None
    relaunch: asyncio.Event = field(default_factory=asyncio.Event)
    crashes_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_CRASHES_KEPT))
    keeper: asyncio.Task[None] | None = None
    spawning: asyncio.Lock = field(default_factory=asyncio.Lock)

    def ids(self) -> dict[str, InstanceId]:
        """Of the instances of the last process, by name."""
        names = (*(self.instances or (self.name,)), *self.added)
        return {} if self.instance_id is None else {name: member_id(name, self.instance_id) for name in names}


class LocalLauncher:
    """Slots and their processes. on_exit is called with slot and exit status of each process that ends by itself. make_slot:
    for one instance more, from its name, kind and group; None: there are never more than at first. max_instances: with engine
    roles, those that start or are started again included, whoever asks for more and whatever it knows; 0: no bound."""

    def __init__(
        self,
        on_exit: Callable[[Slot, int], None],
        template: Template | None = None,
        make_slot: Callable[[str, str, str], Slot] | None = None,
        max_instances: int = 0,
    ) -> None:
        self._on_exit = on_exit
        self._template = template
        self._make_slot = make_slot
        self._max_instances = max_instances
        self._slots: dict[str, Slot] = {}
        self._drained: deque[InstanceId] = deque(maxlen=NUM_DRAINED_KEPT)
        self._bus: Bus | None = None
        self._is_stopping = False

    async def use_bus(self, bus: Bus) -> None:
        """From now on losses are told."""
        await bus.listen(LOST_SUBJECT, self._on_event)
        self._bus = bus

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Lost) and event.expected:
            self._drained.append(event.instance_id)
            for slot in self._slots.values():
                if event.name in slot.added:
                    slot.added.remove(event.name)

    def pids(self) -> dict[str, int]:
        """Of the running processes, by slot name."""
        return {slot.name: slot.child.pid for slot in self._slots.values() if slot.child is not None and slot.child.is_running}

    def names(self) -> list[str]:
        """Of all slots, those that were added since the start, too."""
        return list(self._slots)

    def _num_instances(self) -> int:
        """All that have engine roles and were not drained."""
        num = 0
        for slot in self._slots.values():
            ids = slot.ids() or dict.fromkeys(slot.instances or (slot.name,))
            there = [name for name, id_ in ids.items() if slot.relaunch.is_set() or id_ not in self._drained]
            num += sum(name.rpartition("-")[0] in ROLES_OF for name in there)
        return num

    async def start(self, slot: Slot) -> Child:
        """The slot's first process; it is kept running from now on."""
        self._slots[slot.name] = slot
        child = await self._spawn(slot)
        if child is None:
            raise Overloaded("everything is being stopped", code="slot_busy")
        slot.keeper = asyncio.create_task(self._keep(slot, child), name=f"keep {slot.name}")
        return child

    async def handle(self, request: InstanceRequest) -> Message | None:
        """LaunchRequest: start an ended slot again. ScaleOutRequest: one instance more, in a slot whose last one was drained,
        or in a new one.

        Raises:
            BadRequest: no such slot, or kind.
            Overloaded: its process is still there, or was asked for already (by another instance that shared it), or there are
                too many, or everything is being stopped.
            InstanceLost, DeadlineExceeded: the process that is to start one more is gone, or does not answer.
        """
        match request:
            case LaunchRequest(name):
                return self._launch_again(name)
            case ScaleOutRequest(kind, group):
                return Launched(await self._scale_out(kind, group))
        raise BadRequest(f"the launcher takes no {type(request).__name__}", code="wrong_instance")

    def _launch_again(self, name: str) -> Accepted:
        slot = next((slot for slot in self._slots.values() if name in (slot.name, *slot.ids())), None)
        if slot is None:
            raise BadRequest(f"there is no slot {name!r}", code="no_such_slot")
        if self._is_stopping or slot.relaunch.is_set() or (slot.child is not None and slot.child.is_running):
            raise Overloaded(f"slot {name} can't be started now", code="slot_busy")
        slot.relaunch.set()
        return Accepted()

    async def _scale_out(self, kind: str, group: str) -> str:
        if kind not in ROLES_OF:
            raise BadRequest(f"there are no instances of kind {kind!r}", code="bad_setting")
        if 0 < self._max_instances <= self._num_instances():
            raise Overloaded(f"there are {self._max_instances} instances, and there may be no more", code="slot_busy")
        if self._is_stopping or self._make_slot is None:
            raise Overloaded("no instances can be added now", code="slot_busy")
        if (slot := next((slot for slot in self._slots.values() if slot.takes_more), None)) is not None:
            return await self._add_to(slot, ScaleOutRequest(kind, group))
        taken = {name for slot in self._slots.values() for name in (slot.name, *slot.instances)}
        for name in itertools.islice((f"{kind}-{index}" for index in itertools.count()), MAX_LAUNCHED):
            if name not in taken:
                slot = self._slots[name] = self._make_slot(name, kind, group)
                slot.keeper = asyncio.create_task(self._launch_and_keep(slot), name=f"keep {name}")
                return name
            if name in self._slots and self._is_vacant(self._slots[name]):
                slot = self._slots[name]
                slot.make_spec = self._make_slot(name, kind, group).make_spec
                slot.relaunch.set()
                return name
        raise Overloaded(f"there are {MAX_LAUNCHED} instances of kind {kind} already", code="slot_busy")

    async def _add_to(self, slot: Slot, request: ScaleOutRequest) -> str:
        if self._bus is None or slot.instance_id is None:
            raise Overloaded("it is being started", code="slot_busy")
        reply = await self._bus.request(slot.instance_id, request, ADD_TIMEOUT_S)
        if not isinstance(reply, Launched):
            raise InternalError(f"{slot.name} answered with a {type(reply).__name__}")
        slot.added.append(reply.name)
        return reply.name

    def _is_vacant(self, slot: Slot) -> bool:
        """Its last process was drained and has ended, and nobody has asked for another one."""
        has_ended = slot.child is not None and not slot.child.is_running
        return has_ended and not slot.relaunch.is_set() and self._is_drained(slot)

    def _is_drained(self, slot: Slot) -> bool:
        return all(instance_id in self._drained for instance_id in slot.ids().values())

    async def _launch_and_keep(self, slot: Slot) -> None:
        await self._keep(slot, await self._spawn(slot))

    async def stop(self, names: list[str], timeout_s: float) -> None:
        """End these slots' processes, all at once; SIGKILL for those that take longer than timeout_s."""
        self._is_stopping = True
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                if name in self._slots:
                    tasks.create_task(self._stop_slot(self._slots[name], timeout_s))

    async def _stop_slot(self, slot: Slot, timeout_s: float) -> None:
        async with slot.spawning:  # no process may be half started when we look
            if slot.child is not None:
                await slot.child.stop(timeout_s)
        if slot.keeper is not None:
            slot.keeper.cancel()

    def kill_all(self) -> None:
        """For a user who is out of patience."""
        self._is_stopping = True
        for slot in self._slots.values():
            if slot.child is not None:
                slot.child.send_signal(signal.SIGKILL)

    async def _spawn(self, slot: Slot) -> Child | None:
        async with slot.spawning:
            if self._is_stopping:
                return None
            slot.instance_id = new_instance_id(slot.name)
            slot.added.clear()
            spec = slot.make_spec(slot.instance_id)
            slot.child = await self._fork(spec, slot.log)
            if slot.child is None and not self._is_stopping:
                slot.child = await Child.start(spec, slot.log)
            slot.relaunch.clear()  # at the end: each instance of a shared process is asked for, and all came with this one
            return slot.child

    async def _fork(self, spec: ChildSpec, log: ChildLog) -> Child | None:
        """None when this process is not one to be forked, or can't be now."""
        if self._template is None or spec.fork_arguments is None:
            return None
        reader, writer = os.pipe()
        try:
            pid = await self._template.fork(spec, writer)
        except BaseException as error:
            os.close(reader)
            if isinstance(error, NoTemplateError):
                return None
            raise
        finally:
            os.close(writer)
        return await Child.inherit(spec.name, pid, reader, log)

    async def _keep(self, slot: Slot, child: Child | None) -> None:
        while child is not None:
            status = await child.wait()
            if self._is_stopping:
                return
            self._on_exit(slot, status)
            if slot.is_own:
                await self._tell(slot, status)
                await self._pause(slot)
            else:
                await self._until_asked(slot, status)
            child = await self._spawn(slot)

    async def _pause(self, slot: Slot) -> None:
        now_s = time.monotonic()
        slot.crashes_s.append(now_s)
        await asyncio.sleep(decide_restart(False, slot.crashes_s, now_s).delay_s or 0.0)

    async def _until_asked(self, slot: Slot, status: int) -> None:
        while not slot.relaunch.is_set():
            is_drained = self._is_drained(slot)
            if not is_drained:
                await self._tell(slot, status)
            try:
                async with asyncio.timeout(None if is_drained else TELL_INTERVAL_S):
                    await slot.relaunch.wait()
            except TimeoutError:
                continue

    async def _tell(self, slot: Slot, status: int) -> None:
        if self._bus is None:
            return
        for name, instance_id in slot.ids().items():
            await self._bus.publish_event(LOST_SUBJECT, Lost(instance_id, name, status, expected=False))
