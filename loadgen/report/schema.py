"""What report.json holds, version 1: the one form from which the table, the CSV, the page and comparisons are made.

Times are seconds, percentiles are of nearest rank and within 0.25 %; mean and max are exact. None stands where there is nothing
to measure. Fields are only added within a version.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

VERSION = 1
REAL = "real"  # the label of a target that says nothing else
CURVE_LEVELS = (1.0, 5.0, *(float(level) for level in range(10, 95, 5)), 95.0, 97.0, 98.0, 99.0, 99.5, 99.9)  # chosen

CurveFigure = Literal["ttft_s", "tbt_over_tokens_s", "e2e_s"]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How one figure spreads over requests, or over the gaps between tokens."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests met an SLO. A failed request has met none; one without a limit for a part meets that part."""

    num_requests: Annotated[int, Meta(description="that have a limit; the shares are of these")]
    met: Annotated[float, Meta(description="share that met TTFT and TBT limits, the attainment")]
    met_ttft: float
    met_tbt: Annotated[float, Meta(description="share whose mean TBT was within the limit")]
    goodput_per_s: Annotated[float, Meta(description="requests/s that met it")]


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one class of requests. Latencies are those of finished requests, from the scheduled time."""

    name: Annotated[str, Meta(description="all, a class of the trace (text, image), or a number of pictures")]
    num_requests: Annotated[int, Meta(description="finished and failed; neither cancelled, unfinished nor warm-up")]
    num_finished: int
    num_cancelled: Annotated[int, Meta(description="by the replay itself, on purpose; in no other figure")]
    num_unfinished: Annotated[int, Meta(description="when the replay was ended; in no other figure")] = 0
    errors: Annotated[dict[str, int], Meta(description="by kind: http_429, timeout, connection, broken_stream, ...")]
    offered_per_s: Annotated[float | None, Meta(description="requests/s as scheduled, from the first to the last")]
    finished_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_chunk: Annotated[
        float | None, Meta(description="over 1: several tokens come at once, and TBT over tokens is between chunks")
    ]
    cache_use: Annotated[float | None, Meta(description="cached / prompt tokens")]
    num_answers_known: int
    num_answers_right: int
    ttft_s: Distribution | None
    tbt_over_tokens_s: Annotated[Distribution | None, Meta(description="each gap between two chunks with content counts")]
    tbt_request_mean_s: Annotated[Distribution | None, Meta(description="each request's decode time / (tokens - 1) counts")]
    e2e_s: Distribution | None
    input_s_per_token: Annotated[
        Distribution | None, Meta(description="normalised input latency: TTFT / prompt tokens (LoongServe, arXiv 2404.09526)")
    ]
    output_s_per_token: Annotated[
        Distribution | None, Meta(description="normalised output latency: decode time / output tokens (same source)")
    ]
    slo_class_wide: Annotated[Attainment | None, Meta(description="one limit for the whole class")]
    slo_own_scaled: Annotated[Attainment | None, Meta(description="limit scaled with each request's own isolated latency")]


class ClassOverTime(msgspec.Struct, frozen=True, kw_only=True):
    """One class, bin by bin."""

    name: str
    num_arrivals: list[int]
    ttft_p50_s: list[float | None]
    ttft_p99_s: list[float | None]


class OverTime(msgspec.Struct, frozen=True, kw_only=True):
    """The run in bins of equal width, the first from 0. Load (arrivals, in flight, tokens, errors) is of all requests, TTFT of
    those that are measured, at the time of their arrival."""

    width_s: float
    classes: list[ClassOverTime]
    in_flight: Annotated[list[float], Meta(description="requests, mean over the bin")]
    output_tokens_per_s: list[float]
    num_errors: Annotated[list[int], Meta(description="at the time at which they failed")]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one class at each of the report's curve_levels."""

    figure: CurveFigure
    class_name: str
    values: Annotated[list[float], Meta(description="fewer than levels: beyond the last there is less than one request")]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one replay."""

    version: Annotated[int, Meta(description="of this form: 1")] = VERSION
    label: Annotated[str, Meta(description="what was measured: real, or else it says emulated or simulated")]
    conditions: Annotated[dict[str, Any], Meta(description="of the run, as the replay recorded them")]
    span_s: Annotated[float, Meta(description="from the first measured request to the end of the last; rates are over it")]
    warnings: Annotated[list[str], Meta(description="what a reader has to know before believing a figure")]
    classes: Annotated[list[ClassFigures], Meta(min_length=1, description="all, classes of the trace, by number of pictures")]
    warm_up: Annotated[ClassFigures | None, Meta(description="requests before the measured ones, in no other figure")]
    send_lag_s: Annotated[
        Distribution | None, Meta(description="sent after scheduled; large: the client was measured, or a concurrency cap")
    ]
    over_time: OverTime | None
    curve_levels: Annotated[tuple[float, ...], Meta(description="percentiles")] = CURVE_LEVELS
    curves: list[Curve]

    @property
    def is_real(self) -> bool:
        return self.label == REAL

    @property
    def every_class(self) -> list[ClassFigures]:
        """The classes, and last the warm-up."""
        return [*self.classes, *([self.warm_up] if self.warm_up is not None else [])]

    @property
    def headline(self) -> str:
        """What was replayed against what."""
        return f"{self.conditions.get('trace')} on {self.conditions.get('model')}"

    @property
    def origin(self) -> str:
        """Where the figures come from."""
        known = self.conditions
        versions = ", ".join(f"{name} {version}" for name, version in dict(known.get("versions", {})).items())
        return f"{self.label} target {known.get('target')}, seed {known.get('seed')}, {known.get('started_at')}; {versions}"
