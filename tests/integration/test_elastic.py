"""The scaler's loop with a strategy that follows a script, in a cluster of one process: what it sees, does, logs and tells."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import msgspec
import pytest

from triptych.services.scaler import actuator
from triptych.services.scaler.app import Scaler
from triptych.shared.bus import Bus
from triptych.shared.decision_entry import DecisionEntry, DecisionList
from triptych.shared.errors import InstanceLost, Overloaded
from triptych.shared.instance_info import Resources, StageLoad
from triptych.shared.messages import (
    Accepted,
    DrainRequest,
    Event,
    Heartbeat,
    InstanceId,
    Launched,
    Lost,
    Message,
    Role,
    ScaleOutRequest,
    SwitchReply,
    SwitchRequest,
)
from triptych.shared.metrics import exposition
from triptych.shared.policies.elastic.actions import Advise, Decision, Drain, Launch, Switch, Wanted
from triptych.shared.policies.elastic.strategy import Memory
from triptych.shared.policies.elastic.views import ClusterView
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.registry import Registry
from triptych.shared.service import ServiceContext
from triptych.shared.settings import Settings

WAIT_S = 15.0
BEAT_S = 0.01
LAUNCHER, SCALER = InstanceId("launcher-ab"), InstanceId("scaler-0-ab")
FAST: dict[str, Any] = {"emulate": "a100", "model": "llama-3.2-11b", "time_scale": 1000.0, "heartbeat_interval_s": BEAT_S}


@dataclass
class Instance:
    """Switches at once, unless it is broken; drains at once, too."""

    beat: Heartbeat
    is_broken: bool = False


class Cluster:
    """Instances, a launcher unless there is none, and the registry of the scaler that hears them. It is the scaler's bus."""

    def __init__(self, *names: str, has_launcher: bool = True, registry: Registry | None = None) -> None:
        self.registry = registry or Registry(5.0)
        self.is_hung = False
        self.instances: dict[InstanceId, Instance] = {}
        self.asked: list[Message] = []
        for name in names:
            self.add(name)
        if has_launcher:
            self.registry.on_event(self._beat("launcher", "launcher", (), LAUNCHER), time.monotonic())

    def add(self, name: str, group: str = "") -> Instance:
        beat = self._beat(name, "instance", ROLES_OF[name.rpartition("-")[0]], InstanceId(f"{name}-ab"))
        made = self.instances[beat.instance_id] = Instance(msgspec.structs.replace(beat, group=group))
        return made

    def other_scaler(self) -> Heartbeat:
        """One whose id comes first."""
        return self._beat("scaler-0", "scaler", (), InstanceId("scaler-0-aa"))

    def _beat(self, name: str, service: Any, roles: Sequence[Role], instance_id: InstanceId) -> Heartbeat:
        held = Resources(1, 1, num_blocks=10, num_free_blocks=10)
        loads = tuple(StageLoad(role) for role in roles)
        return Heartbeat(instance_id, name, service, "ready", tuple(roles), "", BEAT_S, "h", loads, held)

    async def beat_forever(self) -> None:
        while True:
            beats = [instance.beat for instance in self.instances.values()]
            for beat in () if self.is_hung else (*beats, self._beat("scaler-0", "scaler", (), SCALER)):
                self.registry.on_event(beat, time.monotonic())
            await asyncio.sleep(BEAT_S)

    async def listen(self, subject: str, callback: Callable[[Event], None]) -> None:
        """Nobody is lost here."""

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Message:
        self.asked.append(message)
        if isinstance(message, ScaleOutRequest):
            if len(self.instances) >= 6:
                raise Overloaded("there are too many")
            index = sum(one.beat.name.startswith(message.kind) for one in self.instances.values())
            return Launched(self.add(f"{message.kind}-{index}", message.group).beat.name)
        instance = self.instances.get(instance_id)
        if instance is None or instance.is_broken:
            raise InstanceLost("gone", instance_id=instance_id)
        if isinstance(message, SwitchRequest):
            instance.beat = msgspec.structs.replace(instance.beat, roles=message.roles, group=message.group)
            self.registry.on_event(instance.beat, time.monotonic())
            return SwitchReply(0.001)
        assert isinstance(message, DrainRequest)
        del self.instances[instance_id]
        self.registry.on_event(Lost(instance_id, instance.beat.name, 0, expected=True), time.monotonic())
        return Accepted()


@dataclass
class Scripted:
    """Decides what comes next in the script, then nothing. views: what it saw."""

    script: list[list[Decision]]
    period_s: float = 1.0
    views: list[ClusterView] = field(default_factory=list)

    def decide(self, view: ClusterView, memory: Memory) -> tuple[list[Decision], Memory]:
        self.views.append(view)
        return (self.script.pop(0) if self.script else []), replace(memory, planned_at_s=view.now_s)


class Run:
    """A scaler over a cluster."""

    def __init__(self, cluster: Cluster, *script: list[Decision], **settings: Any) -> None:
        self.cluster = cluster
        self.strategy = Scripted(list(script))
        chosen = Settings(**{"elastic": "on", **FAST, **settings})
        self.context = ServiceContext(chosen, SCALER, "scaler-0", cast(Bus, cluster), cluster.registry, "", "127.0.0.1")
        self.scaler = Scaler(chosen, self.strategy)
        self._beating = asyncio.create_task(cluster.beat_forever())

    async def stop(self) -> None:
        self._beating.cancel()
        await self.scaler.stop()

    async def told(self) -> DecisionList:
        """What the API answers."""
        transport = httpx.ASGITransport(self.scaler.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://scaler") as http:
            return msgspec.json.decode((await http.get("/v1/decisions")).content, type=DecisionList)

    async def until_told(self, holds: Callable[[tuple[DecisionEntry, ...]], bool], what: str) -> tuple[DecisionEntry, ...]:
        end_s = time.monotonic() + WAIT_S
        while not holds(entries := (await self.told()).decisions):
            assert time.monotonic() < end_s, f"waited in vain for {what}: {entries}"
            await asyncio.sleep(BEAT_S)
        return entries

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        await self.until_told(lambda _: holds(), what)

    def metric(self, line: str) -> float:
        """The value of `name{labels}`."""
        lines = exposition(self.context.metrics).decode().splitlines()
        return float(next((one.rpartition(" ")[2] for one in lines if one.startswith(f"{line} ")), "nan"))


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    runs: list[Run] = []

    async def start(cluster: Cluster, *script: list[Decision], **settings: Any) -> Run:
        runs.append(Run(cluster, *script, **settings))
        await runs[-1].scaler.start(runs[-1].context)
        return runs[-1]

    yield start
    for run in runs:
        await run.stop()


def switch(name: str, *roles: Role, group: str = "") -> Decision:
    return Decision(
        Switch(InstanceId(f"{name}-ab"), frozenset(roles), group), f"more {'+'.join(roles)}", {"gain": 2.0, "cost": 0.5}
    )


def finished(*results: str) -> Callable[[tuple[DecisionEntry, ...]], bool]:
    return lambda entries: [entry.result for entry in entries] == list(results)


SMALL = ("encoder-0", "prefill-0", "decode-0", "decode-1")


async def test_a_switch_is_carried_out_explained_and_followed_up(start: Start) -> None:
    run = await start(Cluster(*SMALL), [switch("decode-1", "prefill", group="multimodal")])
    [entry] = await run.until_told(lambda entries: bool(entries) and len(entries[0].outcomes) == 2, "both outcomes")
    beat = run.cluster.instances[InstanceId("decode-1-ab")].beat
    assert (beat.roles, beat.group) == (("prefill",), "multimodal")
    assert (entry.action, entry.target, entry.to) == ("switch", "decode-1-ab", "prefill multimodal")
    assert (entry.result, entry.reason, entry.terms) == ("done", "more prefill", {"gain": 2.0, "cost": 0.5})
    assert entry.before.instances == {"decode": 2, "encoder": 1, "prefill": 1}
    assert entry.outcomes[0].look.instances == {"decode": 1, "encoder": 1, "prefill": 1, "prefill multimodal": 1}
    assert entry.outcomes[0].after_s >= 10.0
    told = await run.told()
    assert (told.policy, told.elastic, told.num_decisions) == ("triptych", "on", 1)
    assert run.metric('triptych_elastic_actions_total{action="switch",result="done"}') == 1
    assert run.metric("triptych_switch_seconds_count") == 1
    assert run.metric('triptych_replicas{group="",kind="decode"}') == 1
    assert math.isnan(run.metric('triptych_wanted_replicas{group="multimodal",kind="prefill"}')), "nobody decided how many"


async def test_views_hand_on_memory_clock_limits_and_costs(start: Start) -> None:
    run = await start(Cluster(*SMALL), min_instances=2, max_instances=9)
    await run.until(lambda: len(run.strategy.views) >= 3, "three views")
    first, second = run.strategy.views[:2]
    assert (first.limits.min_instances, first.limits.max_instances) == (2, 9)
    assert second.now_s - first.now_s >= 1000.0 * BEAT_S * 0.9, "modelled seconds"
    assert first.costs.capacity["decode"] > 100, "by published figures"
    assert all(one.is_ready for one in second.instances)
    assert {one.since_s for one in first.instances} == {one.since_s for one in second.instances}


async def test_nothing_is_decided_before_everybody_is_there(start: Start) -> None:
    cluster = Cluster("encoder-0", "prefill-0")
    run = await start(cluster)
    await run.until(lambda: run.metric('triptych_instance_seconds_total{kind="prefill"}') > 10 * BEAT_S, "many looks")
    assert not run.strategy.views
    cluster.add("decode-0")
    await run.until(lambda: bool(run.strategy.views), "a view")
    assert len(run.strategy.views[0].instances) == 3


async def test_what_would_leave_a_stage_empty_is_refused_also_in_one_round(start: Start) -> None:
    round_ = [
        switch("prefill-0", "decode"),
        switch("decode-0", "prefill"),
        switch("prefill-0", "decode"),
        switch("decode-1", "encoder"),
    ]
    run = await start(Cluster(*SMALL), round_)
    entries = await run.until_told(finished("refused", "done", "done", "done"), "four results")
    assert entries[0].detail == "nobody else is ready for prefill"
    run.strategy.script.append([Decision(Drain(InstanceId("decode-0-ab")), "too many")])
    entries = await run.until_told(lambda entries: len(entries) == 5 and entries[4].result != "pending", "a fifth")
    assert (entries[4].result, entries[4].detail) == ("refused", "nobody else is ready for prefill")


async def test_a_failure_is_told_and_the_next_round_may_try_again(start: Start) -> None:
    cluster = Cluster(*SMALL)
    cluster.instances[InstanceId("decode-1-ab")].is_broken = True
    missing = switch("decode-7", "prefill")
    run = await start(cluster, [switch("decode-1", "prefill"), missing], [switch("decode-0", "decode", "prefill")])
    entries = await run.until_told(finished("failed", "failed", "done"), "three results")
    assert [entry.detail for entry in entries[:2]] == ["gone", "it is gone already"]
    await run.until(
        lambda: run.strategy.views[-1].now_s > 0 and all(one.is_ready for one in run.strategy.views[-1].instances), "rest"
    )
    cluster.instances[InstanceId("decode-1-ab")].is_broken = False
    run.strategy.script.append([switch("decode-1", "prefill")])
    await run.until_told(finished("failed", "failed", "done", "done"), "a fourth")


async def test_instances_come_and_go_by_the_launcher(start: Start) -> None:
    run = await start(Cluster(*SMALL), [Decision(Launch("text", "text", 2), "more text")], max_instances=6)
    [entry] = await run.until_told(finished("done"), "the launch")
    assert (entry.detail, entry.to) == ("text-0, text-1", "2 more text")
    await run.until(lambda: len(run.strategy.views[-1].instances) == 6, "both")
    assert run.metric('triptych_wanted_replicas{group="text",kind="text"}') == 2
    run.strategy.script.append([Decision(Launch("text"), "more"), Decision(Drain(InstanceId("text-1-ab")), "less")])
    entries = await run.until_told(finished("done", "failed", "done"), "the drain")
    assert entries[1].detail == "there are too many"
    await run.until(lambda: len(run.strategy.views[-1].instances) == 5, "one less")
    assert run.metric('triptych_wanted_replicas{group="text",kind="text"}') == 1
    assert run.metric('triptych_instance_seconds_total{kind="text"}') > 0


async def test_an_instance_leaves_whatever_its_roles_are(start: Start) -> None:
    """Also a combination that no kind of instances begins with."""
    leaving = Decision(Drain(InstanceId("decode-1-ab")), "less")
    run = await start(Cluster(*SMALL), [switch("decode-1", "encoder", "decode")], [leaving], max_instances=6)
    await run.until_told(finished("done", "done"), "the drain")
    assert InstanceId("decode-1-ab") not in run.cluster.instances


async def test_without_a_launcher_the_metric_tells_what_is_wanted(start: Start) -> None:
    run = await start(Cluster(*SMALL, has_launcher=False), [Decision(Launch("text", "text", 2), "more")])
    await run.until_told(finished("advised"), "the advice")
    await run.until(lambda: len(run.strategy.views[-1].instances) == 6, "what is awaited to count")
    assert run.metric('triptych_wanted_replicas{group="text",kind="text"}') == 2
    assert run.cluster.asked == []
    run.cluster.add("text-9", "text")
    await run.until(
        lambda: [one.is_ready for one in run.strategy.views[-1].instances].count(False) == 1, "one of them to be there"
    )


async def test_advise_only_tells_each_thing_once(start: Start) -> None:
    advice = Decision(Advise((Wanted("decode", "", 5),)), "busy")
    script = [[advice, switch("decode-1", "prefill")]] * 3
    run = await start(Cluster(*SMALL), *script, elastic="advise")
    await run.until(lambda: len(run.strategy.views) >= 5, "the end of the script")
    entries = await run.until_told(finished("advised", "advised"), "two, and no more")
    assert entries[0].to == "5 decode"
    assert run.metric('triptych_wanted_replicas{group="",kind="decode"}') == 5
    assert run.cluster.asked == []


async def test_a_new_scaler_takes_back_nothing_that_the_last_one_asked_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it may be starting. Whoever follows the metric keeps it as long as nothing is told."""
    advice = Decision(Advise((Wanted("decode", "", 1), Wanted("encoder", "", 3))), "calm")
    decode, encoder = (f'triptych_wanted_replicas{{group="",kind="{kind}"}}' for kind in ("decode", "encoder"))
    run = await start(Cluster(*SMALL, has_launcher=False), [advice])
    await run.until_told(finished("advised"), "the advice")
    assert run.metric(encoder) == 3, "there is one"
    await run.until(lambda: len(run.strategy.views) > 3, "more looks")
    assert math.isnan(run.metric(decode)), "there are two"
    monkeypatch.setattr(actuator, "PATIENCE_S", 0.1)
    later = await start(Cluster(*SMALL, has_launcher=False), [advice])
    await later.until(lambda: later.metric(decode) == 1, "what was asked for before to count no more")
    assert later.metric(encoder) == 3


async def test_off_is_off(start: Start) -> None:
    run = await start(Cluster(*SMALL), [switch("decode-1", "prefill")], elastic="off")
    await run.until(lambda: run.metric('triptych_instance_seconds_total{kind="decode"}') > 20 * BEAT_S, "many looks")
    assert run.strategy.views == []
    assert (await run.told()).decisions == ()


async def test_a_bug_in_a_strategy_ends_the_scaler(start: Start) -> None:
    """Its process is started again, and begins anew."""
    run = await start(Cluster(*SMALL), cast(Any, [None]))
    await run.until(lambda: run.context.lifecycle.state == "failing", "the end")
    assert run.context.lifecycle.exit_code == 1


async def test_of_two_scalers_one_decides(start: Start) -> None:
    """As while one replaces another; the other one looks on, and goes on when that has left."""
    cluster = Cluster(*SMALL)
    other = cluster.other_scaler()
    cluster.registry.on_event(other, time.monotonic())
    run = await start(cluster, [switch("decode-1", "prefill")])
    await run.until(lambda: run.metric('triptych_instance_seconds_total{kind="decode"}') > 20 * BEAT_S, "many looks")
    assert run.strategy.views == []
    cluster.registry.on_event(Lost(other.instance_id, other.name, 0, expected=True), time.monotonic())
    await run.until_told(finished("done"), "the switch")
    run.strategy.script.append([Decision(Advise((Wanted("text", "", 5),)), "busy")])
    wanted = 'triptych_wanted_replicas{group="",kind="text"}'
    await run.until(lambda: run.metric(wanted) == 5, "its advice")
    another = msgspec.structs.replace(other, instance_id=InstanceId("scaler-0-a1"))
    cluster.registry.on_event(another, time.monotonic())
    await run.until(lambda: math.isnan(run.metric(wanted)), "it to leave that to another one")


class CountingRegistry(Registry):
    """num_stuck: how often it was asked while nobody was heard."""

    num_stuck = 0

    def is_stuck(self, now_s: float) -> bool:
        is_stuck = super().is_stuck(now_s)
        self.num_stuck += is_stuck
        return is_stuck


async def test_nothing_is_decided_while_nobody_is_heard(start: Start) -> None:
    """What the scaler knows is old then, and what routers counted meanwhile is no burst when it is told."""
    registry = CountingRegistry(0.5, SCALER)
    cluster = Cluster(*SMALL, registry=registry)
    run = await start(cluster)
    await run.until(lambda: len(run.strategy.views) >= 2, "two views")
    cluster.is_hung = True
    await run.until(lambda: registry.num_stuck > 0, "that it hangs")
    num_views, last_s = len(run.strategy.views), run.strategy.views[-1].now_s
    await run.until(lambda: registry.num_stuck > 20, "many chances")
    assert len(run.strategy.views) == num_views
    cluster.is_hung = False
    await run.until(lambda: len(run.strategy.views) > num_views, "another view")
    assert run.strategy.views[num_views].now_s - last_s > 20 * BEAT_S * run.context.settings.time_scale
