"""The loop of elasticity: looks at the cluster, asks the policy set's strategy, carries out what it decides, and logs it all.

Measures at every heartbeat; decides when the strategy wants to, once what was decided before has been carried out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import structlog

from triptych.services.scaler.actuator import Actuator
from triptych.services.scaler.cluster_state import ClusterState
from triptych.services.scaler.decision_log import DecisionLog, described
from triptych.services.scaler.scaler_metrics import ScalerMetrics
from triptych.shared.decision_entry import DecisionList
from triptych.shared.policies.elastic.actions import Action, Decision
from triptych.shared.policies.elastic.costs import measured_costs
from triptych.shared.policies.elastic.demand_meter import DemandMeter
from triptych.shared.policies.elastic.strategy import NOTHING, Elasticity
from triptych.shared.policies.elastic.views import ClusterView, ElasticCosts, Limits
from triptych.shared.policies.groups import Group
from triptych.shared.policies.placement import Kind
from triptych.shared.service import ServiceContext

_log = structlog.get_logger(__name__)


class Controller:
    """`run` as a task of its own. Of several scalers, as while one replaces another, one decides. known_costs: None where only
    what instances measure tells what work costs."""

    def __init__(self, context: ServiceContext, strategy: Elasticity, known_costs: ElasticCosts | None) -> None:
        settings = self._settings = context.settings
        self._registry = context.registry
        self._own_id = context.instance_id
        self._strategy = strategy
        self._known_costs = known_costs
        self._measured: ElasticCosts | None = None
        self._time_scale = settings.time_scale if settings.emulate else 1.0
        self._state = ClusterState(DemandMeter(self._now_s()), settings.block_size, self._time_scale)
        self._log = DecisionLog()
        self._metrics = ScalerMetrics(context.metrics)
        self._actuator = Actuator(context, self._state, self._observe)
        self._memory = NOTHING
        self._limits: Limits | None = None
        self._observed_s = self._now_s()
        self._decide_at_s = self._observed_s
        self._alone_since_s = self._observed_s
        self._advised: set[Action] = set()

    def decisions(self, limit: int) -> DecisionList:
        """The last ones, oldest first."""
        settings = self._settings
        return DecisionList(settings.policy, settings.elastic, self._log.num_decisions, self._log.latest(limit))

    async def run(self) -> None:
        """Until cancelled."""
        period_s = self._settings.elastic_period_s or self._strategy.period_s
        async with asyncio.TaskGroup() as tasks:
            deciding: asyncio.Task[None] | None = None
            while True:
                await asyncio.sleep(self._settings.heartbeat_interval_s)
                if self._registry.is_stuck(time.monotonic()):
                    continue  # what is known is old, and nobody would hear of a decision
                now_s = self._observe()
                is_free = self._leads() and (deciding is None or deciding.done())
                if is_free and self._state.is_complete and now_s >= self._decide_at_s:
                    self._decide_at_s = now_s + period_s
                    deciding = tasks.create_task(self._decide(now_s), name="decide")

    def _leads(self) -> bool:
        """Whether this is the one that decides: all agree, as soon as they have heard each other."""
        return min((beat.instance_id for beat in self._registry.ready(service="scaler")), default=self._own_id) == self._own_id

    def _now_s(self) -> float:
        """The policy's clock."""
        return self._time_scale * time.monotonic()

    def _observe(self) -> float:
        """Takes in what was heard; the time of that."""
        now_s = self._now_s()
        self._metrics.spend(self._state.paid(), (now_s - self._observed_s) / self._time_scale)
        self._observed_s = now_s
        self._state.observe(self._registry.all(), now_s)
        counts = self._state.counts()
        self._metrics.show(counts, self._state.demand())
        self._tell_wanted(now_s, counts)
        self._log.observe(now_s, self._state.look)
        return now_s

    def _tell_wanted(self, now_s: float, counts: Counter[tuple[Kind, Group]]) -> None:
        """What another scaler has asked for may still be on its way, and nobody here knows how many: at first only more are
        asked for. What was told by this one is void once another one decides."""
        wanted = self._actuator.wanted
        if not self._leads():
            self._alone_since_s, self._memory = now_s, NOTHING
            wanted.forget()
        wanted.hold_back(counts if now_s < self._alone_since_s + self._actuator.patience_s else None)

    async def _decide(self, now_s: float) -> None:
        decisions, self._memory = self._strategy.decide(self._view(now_s), self._memory)
        is_told_only = self._settings.elastic == "advise"
        if is_told_only:
            decisions = self._news(decisions)
        before, at = self._state.look(), datetime.now(UTC).isoformat(timespec="milliseconds")
        for number, decision in [(self._log.add(one, before, now_s, at), one) for one in decisions]:
            done = self._actuator.tell(decision.action) if is_told_only else await self._actuator.act(decision.action)
            self._log.finish(number, done.result, done.detail, done.took_s)
            action, target, to = described(decision.action)
            self._metrics.on_action(action, done.result, done.took_s)
            _log.info(action, target=target, to=to, reason=decision.reason, result=done.result, detail=done.detail)

    def _news(self, decisions: Iterable[Decision]) -> list[Decision]:
        """What is only told is decided again and again: those that were not decided the last time."""
        decisions = list(decisions)
        news = [one for one in decisions if one.action not in self._advised]
        self._advised = {one.action for one in decisions}
        return news

    def _view(self, now_s: float) -> ClusterView:
        instances = self._state.instances
        if self._limits is None:  # the first time: these are the instances that the cluster was started with
            settings = self._settings
            self._limits = Limits(settings.min_instances or len(instances), settings.max_instances or len(instances))
        costs = self._known_costs
        if costs is None:
            costs = self._measured = measured_costs(instances, self._measured)
        return ClusterView(now_s, instances, costs, self._limits, self._state.demand())
