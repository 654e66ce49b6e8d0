"""What a process tells Prometheus of the pools in its heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from triptych.shared.instance_info import PoolStats, Resources
from triptych.shared.messages import Heartbeat, InstanceId
from triptych.shared.metrics import exposition, watch_process
from triptych.shared.nats_link import BusCounters


def metrics_of(resources: Resources) -> str:
    name = InstanceId("e-0")
    beat = Heartbeat(name, "e", "instance", "ready", ("encoder",), "", 1.0, "", (), resources)
    registry = CollectorRegistry()
    watch_process(registry, cast(Any, SimpleNamespace(bus_counters=BusCounters(), last_heartbeat=beat, loop_lag_s=0.0)))
    return exposition(registry).decode()


def test_pools_are_told_by_their_names() -> None:
    embeddings = PoolStats(1000, 4000, 2, num_hits=7, num_misses=3, num_stale=1, num_evicted=5)
    text = metrics_of(Resources(1, 1, embeddings=embeddings, kv_prefixes=PoolStats(num_hits=9)))
    for line in (
        'triptych_cache_hits_total{pool="embeddings"} 7.0',
        'triptych_cache_hits_total{pool="kv"} 9.0',
        'triptych_cache_stale_total{pool="embeddings"} 1.0',
        'triptych_cache_evicted_total{pool="embeddings"} 5.0',
        'triptych_cache_bytes{pool="embeddings"} 1000.0',
        'triptych_cache_capacity_bytes{pool="embeddings"} 4000.0',
    ):
        assert line in text.splitlines()


def test_a_process_without_pools_tells_of_none() -> None:
    assert "triptych_cache_" not in metrics_of(Resources(1, 1))
