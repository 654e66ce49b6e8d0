"""Bench cache's own arithmetic: intervals, bars, and the counters of services that it sums up."""

from __future__ import annotations

import random
import statistics

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from triptych.loadgen.bench.cache import COUNTERS, LIMITS, Answer, _bars, _check, _interval, _request
from triptych.loadgen.bench.runner import BenchFailed
from triptych.loadgen.bench.service_counters import service_counters


def test_the_interval_of_a_median() -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 0.1) for _ in range(100)]
    low, high = _interval(values)
    assert low < statistics.median(values) < high
    error = 1.2533 * 0.1 / 10  # of a normal distribution's median
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.5)
    assert _interval([1.0] * 30) == (1.0, 1.0)


def test_requests_differ_from_their_first_words_on() -> None:
    one, other = _request(1)["messages"], _request(2)["messages"]
    assert one[0]["content"][:1] != other[0]["content"][:1]
    pictures = [part["image_url"]["url"] for body in (one, other) for part in body[1]["content"] if "image_url" in part]
    assert len(set(pictures)) == 8
    assert _request(1) == _request(1)


def test_bars() -> None:
    figures = {f"{kind}_ratio": limit for kind, limit in LIMITS.items()} | {"cold_ratio": 1.0}
    figures |= {f"{kind}_{what}": 0.0 for kind in LIMITS for what in COUNTERS}
    assert all(bar.holds for bar in _bars(figures).values())
    for name in ("second_ratio", "follow_up_ratio", "kv_evicted_ratio", "cold_ratio", "second_decoded", "kv_evicted_encoded"):
        assert [key for key, bar in _bars(figures | {name: figures[name] + 1}).items() if not bar.holds] == [name]


@pytest.mark.parametrize("kind", ["first", "second"])
def test_a_request_that_is_not_what_its_name_says(kind: str) -> None:
    measured = {"first": Answer(1.0, "", 0), "second": Answer(1.0, "", 16)}
    _check(measured)
    with pytest.raises(BenchFailed, match=kind):
        _check(measured | {kind: Answer(1.0, "", 16 - measured[kind].num_cached_tokens)})


async def test_counters_are_summed_over_services_and_labels() -> None:
    registry = CollectorRegistry()
    Counter("triptych_images_encoded", "x", registry=registry).inc(3)
    labelled = Counter("triptych_cache_hits", "x", ["pool"], registry=registry)
    labelled.labels("kv").inc(2)
    labelled.labels("embeddings").inc(5)
    Counter("others", "x", registry=registry).inc()
    Gauge("triptych_ready", "x", registry=registry).set(1)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("/")).rstrip("/")
        assert await service_counters(http, [url, url]) == {"images_encoded": 6, "cache_hits": 14}
