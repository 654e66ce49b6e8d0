"""Prometheus metrics every process has: its bus, its state, its loop. Each process owns its CollectorRegistry.

Services add their own metrics to `ServiceContext.metrics`; nothing is registered at import.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.shared.instance_info import Resources
from triptych.shared.messages import Heartbeat
from triptych.shared.nats_link import BusCounters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "num_blocks": "KV blocks of this instance",
    "num_free_blocks": "KV blocks that nobody uses",
    "num_cached_blocks": "KV blocks kept only for reuse",
    "num_leased_blocks": "KV blocks waiting for their puller",
    "tensor_store_bytes": "bytes of leased tensors",
    "tensor_store_capacity_bytes": "bytes the tensor store may hold",
    "num_leases": "tensors leased to others",
    "pss_bytes": "memory of this process (PSS)",
}

_POOL_GAUGES = {
    "num_bytes": "what a pool of the cache holds",
    "capacity_bytes": "what a pool of the cache may hold",
    "num_entries": "blocks of KV, embeddings of images",
}
_POOL_COUNTERS = {
    "num_hits": "looked for in a pool and found",
    "num_misses": "looked for in a pool and not found",
    "num_stale": "not found where the index said it was",
    "num_evicted": "made room for others",
}


class ProcessView(Protocol):
    """What the metrics read of a running process."""

    @property
    def bus_counters(self) -> BusCounters: ...

    @property
    def last_heartbeat(self) -> Heartbeat | None: ...

    @property
    def loop_lag_s(self) -> float: ...


class ProcessMetrics(Collector):
    """Reads the numbers when they are asked for: counting costs the hot paths nothing."""

    def __init__(self, view: ProcessView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """One family for each counter and gauge, read now."""
        counters = self._view.bus_counters
        for field in fields(counters):
            what = field.name.removeprefix("num_")
            yield CounterMetricFamily(f"triptych_bus_{what}", f"bus: {what}", value=getattr(counters, field.name))
        yield GaugeMetricFamily("triptych_event_loop_lag_seconds", "last lag of the event loop", value=self._view.loop_lag_s)
        beat = self._view.last_heartbeat
        if beat is None:
            return
        yield GaugeMetricFamily("triptych_ready", "1 when the process takes work", value=float(beat.state == "ready"))
        if beat.model is not None and (emulation := beat.model.emulation) is not None:
            labels = {"gpu": emulation.gpu, "time_scale": f"{emulation.time_scale:g}"}
            yield InfoMetricFamily("triptych_emulation", "times are modelled, not measured", value=labels)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"triptych_{name.removeprefix('num_')}", text, value=getattr(beat.resources, name))
        for name in ("num_waiting", "num_running", "num_pending_tokens"):
            family = GaugeMetricFamily(f"triptych_stage_{name.removeprefix('num_')}", f"{name} of a stage", labels=["stage"])
            for load in beat.loads:
                family.add_metric([load.stage], getattr(load, name))
            yield family
        yield from _pools(beat.resources)


def _pools(resources: Resources) -> Iterator[Metric]:
    """The pools of an instance's prefix cache, under one label."""
    pools = {"kv": resources.kv_prefixes, "embeddings": resources.embeddings}
    kinds: list[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], dict[str, str]]] = [
        (GaugeMetricFamily, _POOL_GAUGES),
        (CounterMetricFamily, _POOL_COUNTERS),
    ]
    for make, names in kinds:
        for name, text in names.items():
            family = make(f"triptych_cache_{name.removeprefix('num_')}", text, labels=["pool"])
            for label, stats in pools.items():
                if stats is not None:
                    family.add_metric([label], getattr(stats, name))
            if family.samples:
                yield family


def watch_process(registry: CollectorRegistry, view: ProcessView) -> None:
    """Add what every process tells to its registry."""
    ProcessCollector(registry=registry)
    registry.register(ProcessMetrics(view))


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry's metrics in Prometheus's text form."""
    return generate_latest(registry)
