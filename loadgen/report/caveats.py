"""What a reader has to know before believing a figure: how the run ended, and what its numbers cannot say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import NO_SOCKET
from triptych.loadgen.report.tally import Tally
from triptych.shared.units import duration, share

SEND_LAG_LIMIT_S = 0.020  # p99; chosen: more would show in a TTFT of 100 ms
SHORT_RUN_S = 60.0  # chosen: near saturation queues grow for about so long before they show
MAX_TOKENS_PER_CHUNK = 1.05  # chosen: a few chunks of two tokens are no packing


def caveats(conditions: Conditions, whole: Tally, classes: Iterable[str]) -> Iterator[str]:
    """Each a sentence or two. whole: all measured requests. classes: that they are of."""
    yield from _of_the_run(conditions)
    if whole.num_unfinished:
        late = "those that waited longest, so latencies and SLO attainment look better than they were"
        yield f"{whole.num_unfinished:,} requests had not ended when the replay did. They are in no figure: {late}."
    if not whole.num_requests:
        yield "No request was measured."
        return
    if not whole.num_finished:
        yield "No request finished: there are no latencies."
    elif whole.errors:
        failed = whole.errors.total() / whole.num_requests
        yield f"{share(failed)} of the requests failed: latencies are of those that finished."
    if num_ours := whole.errors[NO_SOCKET]:
        yield f"{num_ours:,} requests found no free socket on the machine that sent them: it failed there, not the target."
    (send_lag_s,) = whole.send_lag_s.percentiles((99,))
    if send_lag_s > SEND_LAG_LIMIT_S:
        reason = "The concurrency cap held them back, or the" if conditions.options.get("concurrency") else "The"
        late = f"Requests were sent late: p99 {duration(send_lag_s)}, over {duration(SEND_LAG_LIMIT_S)}."
        yield f"{late} {reason} client was measured, not the server."
    if whole.run.length_s < SHORT_RUN_S:
        yield f"The run took {duration(whole.run.length_s)}: in under {duration(SHORT_RUN_S)} a load too high may not show yet."
    yield from _of_the_tokens(whole)
    for name in classes:
        yield from _of_the_slo(conditions, name)


def _of_the_run(conditions: Conditions) -> Iterator[str]:
    if conditions.ended == "running":
        yield "The replay was cut off before it could say how it went: the figures are of what it had written."
    if conditions.message:
        yield conditions.message
    yield from conditions.notes
    if conditions.num_malformed_rows:
        first = f" The first: {conditions.malformed_rows[0]}." if conditions.malformed_rows else ""
        yield f"{conditions.num_malformed_rows:,} malformed rows of the trace were left out.{first}"


def _of_the_tokens(whole: Tally) -> Iterator[str]:
    if whole.num_empty:
        yield f"{whole.num_empty:,} answers had no text: they have no latencies, and meet no SLO."
    if whole.num_short:
        yield f"{whole.num_short:,} answers are shorter than in the trace: the target does not heed `ignore_eos`, or cuts them."
    if whole.num_without_usage:
        yield f"{whole.num_without_usage:,} answers came without usage: token rates are too low, and their sizes are unknown."
    if whole.num_chunks and whole.num_output_tokens / whole.num_chunks > MAX_TOKENS_PER_CHUNK:
        yield "The server sends several tokens at once: TBT over tokens is the time between such chunks."


def _of_the_slo(conditions: Conditions, name: str) -> Iterator[str]:
    """What an SLO does not say: a limit that nothing is known of is none, and one that requests miss even alone makes any
    ratio of attainments infinite."""
    slo, isolated = conditions.slos.get(name), conditions.isolated.get(name)
    if slo is None:
        return
    medians_s = (None, None) if isolated is None else (isolated.ttft_s, isolated.tbt_s)
    for part, bound, median_s in zip(("TTFT", "TBT"), (slo.ttft, slo.tbt), medians_s, strict=True):
        if bound is None:
            continue
        if median_s is None and bound.is_factor:
            yield f"The isolated {part} of {name} requests is unknown: their limit, a factor of it, is not applied."
        elif median_s is not None and bound.value < (1 if bound.is_factor else median_s):
            yield f"Most {name} requests miss their {part} limit even alone: their isolated median is {duration(median_s)}."
