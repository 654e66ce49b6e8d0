"""What the router counts when a request ends: the work of all its choices, refusals, clients that left."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from triptych.services.router.record import Phase, RequestRecord, StageStamp
from triptych.services.router.router_metrics import RouterMetrics
from triptych.shared.messages import InstanceId


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


def test_the_work_of_all_choices_is_counted() -> None:
    registry = CollectorRegistry()
    first = RequestRecord("r", 0.0, 10.0)
    records = [first, first.sibling(1)]
    for record, num_attempts in zip(records, (1, 2), strict=True):
        for _ in range(num_attempts):
            stamp = StageStamp("prefill", 0.0)
            stamp.begin(InstanceId("prefill-0-a"), "", 1.0)
            stamp.end(2.0)
            record.begin_attempt().stamps.append(stamp)
    first.end(Phase.FINISHED, 3.0)
    RouterMetrics(registry).on_end(records, 200, "stop", Phase.DECODE)
    assert value(registry, "triptych_stage_seconds_count", stage="prefill") == 3
    assert value(registry, "triptych_attempts_repeated_total") == 1
    assert value(registry, "triptych_requests_total", code="200", finish_reason="stop") == 1
    assert value(registry, "triptych_e2e_request_latency_seconds_count", modality="text") == 1


def test_a_request_without_a_place_inside_is_a_rejection() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    for phase, code in ((Phase.ARRIVING, 503), (Phase.ARRIVING, 408), (Phase.ADMITTED, 503)):
        record = RequestRecord("r", 0.0, 10.0, phase)
        record.end(Phase.FAILED, 1.0)
        metrics.on_end([record], code, None, phase)
    assert value(registry, "triptych_rejections_total") == 1
