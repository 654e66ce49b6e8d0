"""Carries out what an elastic strategy decided: switches roles by message, has instances started and drained by a launcher.

One action after the other, each with a timeout. An action that fails is told and forgotten: the next view shows how things are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from triptych.services.scaler.cluster_state import ClusterState, kind_of
from triptych.services.scaler.launchers import AdviseOnly, Launcher, LocalLaunches, Scaling, WantedReplicas
from triptych.shared.decision_entry import Result
from triptych.shared.errors import TriptychError
from triptych.shared.messages import Heartbeat, SwitchRequest
from triptych.shared.policies.elastic.actions import Action, Advise, Drain, Launch, Switch
from triptych.shared.service import ServiceContext

SWITCH_TIMEOUT_S = 5.0  # chosen: an instance answers when its new roles serve, within 0.2 s
SHOWN_POLL_S = 0.005  # chosen: its heartbeat comes just before its answer
PATIENCE_S = 120.0  # chosen: until a launch or a drain counts as failed; starting, loading weights, finishing requests


@dataclass(frozen=True, slots=True)
class Done:
    """What came of an action."""

    result: Result
    detail: str = ""
    took_s: float = 0.0


GONE = Done("failed", "it is gone already")


class Actuator:
    """observe: takes in what was heard, and gives the time on the policy's clock, as of patience_s."""

    def __init__(self, context: ServiceContext, state: ClusterState, observe: Callable[[], float]) -> None:
        self._context = context
        self._state = state
        self._observe = observe
        self._numbers = itertools.count(1)
        self.patience_s = PATIENCE_S * state.time_scale
        self.wanted = WantedReplicas(context.metrics)

    def tell(self, action: Action) -> Done:
        """Do nothing, but say what is wanted."""
        match action:
            case Launch(kind, group, count):
                self.wanted.tell(kind, group, self._state.counts()[kind, group] + count)
            case Advise(wanted):
                for one in wanted:
                    self.wanted.tell(one.kind, one.group, one.count)
        return Done("advised")

    async def act(self, action: Action) -> Done:
        """Returns when it is done, or under way for launches and drains. Does not raise TriptychError: that is a result."""
        begun_s = time.monotonic()
        try:
            match action:
                case Switch():
                    done = await self._switch(action)
                case Launch():
                    done = await self._launch(action)
                case Drain():
                    done = await self._drain(action)
                case Advise():
                    done = self.tell(action)
        except TriptychError as error:
            done = Done("failed", error.message)
        return Done(done.result, done.detail, round(time.monotonic() - begun_s, 4))

    async def _switch(self, action: Switch) -> Done:
        if self._state.find(action.instance_id) is None:
            return GONE
        if alone := self._state.alone_in(action.instance_id, action.roles):
            return _refused(alone)
        roles = tuple(sorted(action.roles))
        request = SwitchRequest(roles, action.group, self._context.settings.drain_timeout_s)
        self._state.begin_switch(action.instance_id, action.roles, action.group)
        self._observe()
        try:
            await self._context.bus.request(action.instance_id, request, SWITCH_TIMEOUT_S)
            await self._until_shown(action)
        finally:
            self._state.end_switch(action.instance_id)
            self._observe()
        return Done("done")

    async def _until_shown(self, action: Switch) -> None:
        """Without its heartbeat the old roles would be decided about again."""
        registry = self._context.registry
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.heartbeat_timeout_s):
                while (beat := registry.get(action.instance_id)) and not _shows(beat, action):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(SHOWN_POLL_S)

    async def _launch(self, action: Launch) -> Done:
        """One by one: where the room ends, those before count."""
        launcher, kind, group = self._launcher(), action.kind, action.group
        names: list[str] = []
        for _ in range(action.count):
            scaling = Scaling(kind, group, self._state.counts()[kind, group] + 1, num_more=1)
            started = await launcher.scale(scaling)
            names += started or ()
            [name] = started or (f"awaited-{next(self._numbers)}",)
            self._state.expect(name, kind, group, self._observe(), self.patience_s)
            self._observe()
        return Done("done", ", ".join(names)) if names else Done("advised")

    async def _drain(self, action: Drain) -> Done:
        leaving = self._state.find(action.instance_id)
        if leaving is None:
            return GONE
        if alone := self._state.alone_in(action.instance_id):
            return _refused(alone)
        kind = kind_of(leaving.roles)
        num_wanted = self._state.counts()[kind, leaving.group] - 1
        done = await self._launcher().scale(Scaling(kind, leaving.group, num_wanted, leaving=(action.instance_id,)))
        self._state.dismiss(leaving, self._observe(), self.patience_s)
        self._observe()
        return Done("advised" if done is None else "done")

    def _launcher(self) -> Launcher:
        """That of this machine when there is one."""
        launchers = self._context.registry.ready(service="launcher")
        if not launchers:
            return AdviseOnly(self.wanted)
        return LocalLaunches(self._context.bus, launchers[0].instance_id, self.wanted)


def _shows(beat: Heartbeat, action: Switch) -> bool:
    return (frozenset(beat.roles), beat.group) == (action.roles, action.group)


def _refused(alone: frozenset[str]) -> Done:
    return Done("refused", f"nobody else is ready for {', '.join(sorted(alone))}")
