"""Isolated latencies: requests such as the trace has, of all its sizes, sent one at a time before the replay."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, LatencyLine
from triptych.loadgen.traces.row import TraceRow

MAX_OUTPUT_TOKENS = 32  # chosen: enough for the time between tokens, and seconds instead of minutes


def sample_rows(rows: Sequence[TraceRow], request_class: str, count: int) -> list[TraceRow]:
    """`count` rows of the class, evenly over its sizes, each to be sent on its own."""
    by_size = sorted((row for row in rows if row.request_class == request_class), key=lambda row: row.num_context_tokens)
    places = np.linspace(0, len(by_size) - 1, min(count, len(by_size))).round().astype(int).tolist() if by_size else []
    return [_alone(by_size[place]) for place in places]


async def measure_isolated(
    rows: Sequence[TraceRow],
    classes: Iterable[str],
    count: int,
    send: Callable[[Iterator[TraceRow]], Awaitable[list[RequestOutcome]]],
) -> dict[str, Isolated]:
    """By class, of those that have rows and at least one good answer.

    Args:
        rows: the trace, or its beginning.
        send: one request after the other.
    """
    found: dict[str, Isolated] = {}
    for name in classes:
        sample = sample_rows(rows, name, count)
        outcomes = (await send(iter([*sample[:1], *sample])))[1:]  # the first one warms up
        if good := [outcome for outcome in outcomes if outcome.error is None and outcome.first_token_s is not None]:
            found[name] = summary(good)
    return found


def summary(outcomes: Sequence[RequestOutcome]) -> Isolated:
    """Of finished requests. Latencies count from sending: each waited for the one before."""
    sizes = [outcome.num_prompt_tokens for outcome in outcomes]
    ttfts_s = [(outcome.first_token_s or 0.0) - outcome.sent_s for outcome in outcomes]
    tbts_s = {place: tbt_s for place, outcome in enumerate(outcomes) if (tbt_s := outcome.mean_tbt_s) is not None}
    return Isolated(
        num_requests=len(outcomes),
        ttft_s=statistics.median(ttfts_s),
        ttft_line=line_through(sizes, ttfts_s),
        tbt_s=statistics.median(tbts_s.values()) if tbts_s else None,
        tbt_line=line_through([sizes[place] for place in tbts_s], list(tbts_s.values())) if tbts_s else None,
    )


def line_through(sizes: Sequence[int], times_s: Sequence[float]) -> LatencyLine:
    """Least squares; flat where the sizes are all alike, or time would fall as they grow."""
    mean_s = statistics.fmean(times_s)
    if len(set(sizes)) < 2:
        return LatencyLine(mean_s, 0.0)
    slope, base_s = statistics.linear_regression(sizes, times_s)
    return LatencyLine(base_s, slope) if slope > 0 and base_s >= 0 else _through_mean(sizes, mean_s, slope)


def _through_mean(sizes: Sequence[int], mean_s: float, slope: float) -> LatencyLine:
    """No negative time for a small request: then time is proportional to size."""
    return LatencyLine(mean_s, 0.0) if slope <= 0 else LatencyLine(0.0, mean_s / statistics.fmean(sizes))


def _alone(row: TraceRow) -> TraceRow:
    num_output_tokens = min(row.num_output_tokens, MAX_OUTPUT_TOKENS)
    return replace(row, arrival_s=0.0, num_output_tokens=num_output_tokens, session=None, prefix_ids=(), image_ids=())
