"""The counts of an index in the process's metrics."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import CollectorRegistry

from triptych.cache.index import IndexCounters
from triptych.cache.index_metrics import IndexMetrics


def test_every_count_is_told_as_it_is_now() -> None:
    registry, counters = CollectorRegistry(), IndexCounters()
    registry.register(IndexMetrics(counters))
    for value, field in enumerate(fields(counters), start=3):
        name = f"triptych_index_{field.name.removeprefix('num_')}_total"
        assert registry.get_sample_value(name) == 0
        setattr(counters, field.name, value)
        assert registry.get_sample_value(name) == value
