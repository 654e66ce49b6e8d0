"""How a process asked the cache index, as Prometheus counters: they follow the index's own counts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.cache.index import IndexCounters

_TEXTS = {
    "round_trips": "questions to the cache index",
    "failures": "questions and hints that it did not take in time",
    "skipped": "questions not asked, since it failed lately",
    "lost": "hints that were dropped",
}


class IndexMetrics(Collector):
    """Register one per process, for its index."""

    def __init__(self, counters: IndexCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """One counter for each of IndexCounters."""
        for name, text in _TEXTS.items():
            yield CounterMetricFamily(f"triptych_index_{name}", text, value=getattr(self._counters, f"num_{name}"))
