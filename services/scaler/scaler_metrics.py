"""The scaler's Prometheus metrics besides the wanted replicas: what there is, what was done, and how well requests fare."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from triptych.shared.decision_entry import ActionName, Result
from triptych.shared.policies.elastic.views import GroupDemand
from triptych.shared.policies.groups import Group
from triptych.shared.policies.placement import Kind

SWITCH_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
ACTIONS: tuple[ActionName, ...] = ("switch", "launch", "drain", "advise")
RESULTS: tuple[Result, ...] = ("done", "failed", "refused", "advised")


class ScalerMetrics:
    """Labels are kinds, groups and names of actions: few."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        self._actions = Counter(
            "triptych_elastic_actions", "decisions about roles and instances", ["action", "result"], registry=metrics
        )
        for action in ACTIONS:
            for result in RESULTS:
                self._actions.labels(action, result)
        self._switch_s = Histogram(
            "triptych_switch_seconds", "asked for until the new roles serve", buckets=SWITCH_BUCKETS_S, registry=metrics
        )
        self._replicas = Gauge(
            "triptych_replicas", "instances of a kind, those that start included", ["kind", "group"], registry=metrics
        )
        self._instance_seconds = Counter(
            "triptych_instance_seconds",
            "time of instances, from the moment that they were asked for until they are gone",
            ["kind"],
            registry=metrics,
        )
        self._attainment = Gauge(
            "triptych_slo_attainment", "share of requests that ended lately within their targets", ["group"], registry=metrics
        )
        self._requests = Gauge("triptych_requests_per_second", "requests that came lately", ["group"], registry=metrics)
        self._images = Gauge("triptych_images_per_second", "pictures that came lately", ["group"], registry=metrics)
        self._shown: set[tuple[Kind, Group]] = set()

    def on_action(self, action: ActionName, result: Result, took_s: float) -> None:
        """One decision was dealt with."""
        self._actions.labels(action, result).inc()
        if (action, result) == ("switch", "done"):
            self._switch_s.observe(took_s)

    def show(self, counts: Mapping[tuple[Kind, Group], int], demand: Mapping[Group, GroupDemand]) -> None:
        """The cluster now. A kind that has gone is told as 0."""
        for key in self._shown - set(counts):
            self._replicas.labels(*key).set(0)
        self._shown |= set(counts)
        for key, count in counts.items():
            self._replicas.labels(*key).set(count)
        for group, one in demand.items():
            self._requests.labels(group).set(one.recent.requests)
            self._images.labels(group).set(one.recent.images)
            if one.attainment is not None:
                self._attainment.labels(group).set(one.attainment)

    def spend(self, paid: Mapping[Kind, int], seconds: float) -> None:
        """So long so many of each kind have been there."""
        for kind, count in paid.items():
            self._instance_seconds.labels(kind).inc(count * seconds)
