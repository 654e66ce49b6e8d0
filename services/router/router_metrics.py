"""The router's Prometheus metrics: requests by code, latencies as its clients feel them, time per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from triptych.services.router.record import PICTURE_ENDS, STAGES, Phase, RequestRecord
from triptych.shared.messages import FinishReason

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
KNOWN_CODES = (200, 400, 404, 408, 413, 499, 500, 503, 504)  # seeded with 0, so that rates exist from the start
MODALITY = {"modality": ("text", "image")}  # labels, and what they may be
STAGE = {"stage": STAGES}


def _by_value(name: str, text: str, values: Mapping[str, Sequence[str]], registry: CollectorRegistry) -> dict[str, Histogram]:
    """A histogram for each value of its one label, seeded."""
    [(label, known)] = values.items()
    histogram = Histogram(name, text, [label], buckets=BUCKETS_S, registry=registry)
    return {value: histogram.labels(value) for value in known}


class RouterMetrics:
    """No request id is ever a label. `code` is the HTTP status; 499: the client left before its answer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "triptych_requests", "requests for text by outcome", ["code", "finish_reason"], registry=registry
        )
        inflight = Gauge(
            "triptych_requests_inflight", "requests for text, arriving ones included", ["stage"], registry=registry
        )
        self.inflight = inflight.labels("router")
        self.rejections = Counter("triptych_rejections", "requests for text refused before they were inside", registry=registry)
        self.retries = Counter("triptych_attempts_repeated", "attempts after the first", registry=registry)
        self.cancellations = Counter("triptych_cancellations", "clients that left", ["stage"], registry=registry)
        self.ttft = _by_value("triptych_time_to_first_token_seconds", "arrival to first token", MODALITY, registry)
        self.e2e = _by_value("triptych_e2e_request_latency_seconds", "arrival to last token", MODALITY, registry)
        self.stage_seconds = _by_value("triptych_stage_seconds", "sent to a stage until its result", STAGE, registry)
        pictures = Counter(
            "triptych_request_pictures", "pictures: KV cached, embeddings held, or encoded", ["how"], registry=registry
        )
        self.pictures = {how: pictures.labels(how) for how in PICTURE_ENDS}
        self.stale = Counter(
            "triptych_request_cache_stale", "times that what the cache index told of was not there", registry=registry
        )
        for code in KNOWN_CODES:
            self.requests.labels(code, "stop" if code == 200 else "")
        self.requests.labels(200, "length")

    def on_end(
        self, records: Sequence[RequestRecord], code: int, finish_reason: FinishReason | None, phase_before: Phase
    ) -> None:
        """Count a request. records: of all its choices, whose work is counted; its latencies are the first one's.
        phase_before: how far it had come."""
        record = records[0]
        if phase_before is Phase.ARRIVING and code == 503:
            self.rejections.inc()
        self.requests.labels(code, finish_reason or "").inc()
        self.retries.inc(sum(max(0, len(one.attempts) - 1) for one in records))
        if record.phase is Phase.CANCELLED:
            self.cancellations.labels(phase_before.value).inc()
        for one in records:
            self.stale.inc(one.num_stale)
            for how, count in one.pictures.items():
                self.pictures[how].inc(count)
        modality = "image" if record.num_image_tokens else "text"
        if record.first_token_at_s is not None:
            self.ttft[modality].observe(record.first_token_at_s - record.arrived_at_s)
        if record.phase is Phase.FINISHED and record.ended_at_s is not None:
            self.e2e[modality].observe(record.ended_at_s - record.arrived_at_s)
        for attempt in (attempt for one in records for attempt in one.attempts):
            for stamp in attempt.stamps:
                if stamp.begun_at_s is not None and stamp.ended_at_s is not None:
                    self.stage_seconds[stamp.stage].observe(stamp.ended_at_s - stamp.begun_at_s)
