"""What a reader has to know before believing a figure: how the run ended, and what its numbers cannot say."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.report.tally import Tally
from triptych.loadgen.report.units import duration, share

SEND_LAG_LIMIT_S = 0.020  # p99; chosen: more would show in a TTFT of 100 ms
SHORT_RUN_S = 60.0  # chosen: near saturation queues grow for about so long before they show
MAX_TOKENS_PER_CHUNK = 1.05  # chosen: a few chunks of two tokens are no packing


def caveats(conditions: Conditions, whole: Tally) -> Iterator[str]:
    """Each a sentence or two. whole: all measured requests."""
    yield from _of_the_run(conditions)
    if not whole.num_requests:
        yield "No request was measured."
        return
    if not whole.num_finished:
        yield "No request finished: there are no latencies."
    elif whole.errors:
        failed = whole.errors.total() / whole.num_requests
        yield f"{share(failed)} of the requests failed: latencies are of those that finished."
    (send_lag_s,) = whole.send_lag_s.percentiles((99,))
    if send_lag_s > SEND_LAG_LIMIT_S:
        reason = "The concurrency cap held them back, or the" if conditions.options.get("concurrency") else "The"
        late = f"Requests were sent late: p99 {duration(send_lag_s)}, over {duration(SEND_LAG_LIMIT_S)}."
        yield f"{late} {reason} client was measured, not the server."
    if whole.run.length_s < SHORT_RUN_S:
        yield f"The run took {duration(whole.run.length_s)}: in under {duration(SHORT_RUN_S)} a load too high may not show yet."
    yield from _of_the_tokens(whole)
    yield from _of_the_slos(conditions)


def _of_the_run(conditions: Conditions) -> Iterator[str]:
    if conditions.ended == "running":
        yield "The replay was cut off before it could say how it went: the figures are of what it had written."
    if conditions.message:
        yield conditions.message
    yield from conditions.notes
    if conditions.num_malformed_rows:
        yield f"{conditions.num_malformed_rows:,} malformed rows of the trace were left out."


def _of_the_tokens(whole: Tally) -> Iterator[str]:
    if whole.num_without_usage:
        yield f"{whole.num_without_usage:,} answers came without usage: token rates are too low, and their sizes are unknown."
    if whole.num_chunks and whole.num_output_tokens / whole.num_chunks > MAX_TOKENS_PER_CHUNK:
        yield "The server sends several tokens at once: TBT over tokens is the time between such chunks."


def _of_the_slos(conditions: Conditions) -> Iterator[str]:
    """A limit that requests miss even alone makes any ratio of attainments infinite."""
    for name, slo in conditions.slos.items():
        isolated = conditions.isolated.get(name)
        if isolated is None:
            continue
        for part, bound, median_s in (("TTFT", slo.ttft, isolated.ttft_s), ("TBT", slo.tbt, isolated.tbt_s)):
            if bound is not None and median_s is not None and bound.value < (1 if bound.is_factor else median_s):
                yield f"Most {name} requests miss their {part} limit even alone: their isolated median is {duration(median_s)}."
