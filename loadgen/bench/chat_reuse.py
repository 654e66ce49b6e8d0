"""The requests of bench cluster: `workloads/chat-reuse` at any rate, what each is to a cache, and the figures of each kind.

A request goes by the pictures of its conversation so far, its own included. `text`: there are none. `known_pictures`: all had
been answered about when it was sent - for each, the first token of a request that brought it was there - at both sides.
`new_pictures`: one had not, at one side or both: whoever asks about a picture while its first encode goes on waits for that,
too. So which requests are known is told by both replays, and is the same for both. `pictures`: both kinds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.schema import ClassFigures, Distribution
from triptych.loadgen.report.tally import Tally
from triptych.loadgen.synth.scaling import Wishes, as_wished
from triptych.loadgen.synth.workload import load_workload
from triptych.loadgen.traces.open import workload_trace
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import Trace, TraceOptions

WORKLOAD = "chat-reuse"
ALL, TEXT, PICTURES, KNOWN, NEW = "all", "text", "pictures", "known_pictures", "new_pictures"
KINDS = (TEXT, KNOWN, NEW)
_ROWS_OF = {TEXT: (ALL, TEXT), KNOWN: (ALL, PICTURES, KNOWN), NEW: (ALL, PICTURES, NEW)}
# People answer four times as quickly as the workload has it (chosen): a conversation takes 15 s instead of a minute, so that a
# run of some minutes is not mostly its beginning, when all conversations are new.
HASTE = 4.0
MAX_IMAGES = 2  # of a prompt, in this workload


def chat_trace(rate_per_s: float, duration_s: float, seed: int) -> Trace:
    """rate_per_s: of requests, once as many conversations end as begin. Each is of a conversation, each picture has a name."""
    wishes = Wishes(duration_s=duration_s * HASTE, rate_per_s=rate_per_s / HASTE, seed=seed)
    return workload_trace(WORKLOAD, as_wished(load_workload(WORKLOAD), wishes), TraceOptions(speed_up=HASTE))


def first_shown(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """Those with a picture that none before has: they are new, whatever a server does."""
    shown: set[int] = set()
    for row in rows:
        if not shown.issuperset(row.image_ids):
            yield row
        shown.update(row.image_ids)


def kinds_of(rows: Sequence[TraceRow], replays: Sequence[Iterable[RequestOutcome]]) -> list[str]:
    """By the index of a request. replays: one at each side, of all rows, warm-up included, whose caches had seen none of them.
    A request that failed has answered about nothing."""
    pictures = _pictures_so_far(rows)
    known = set.intersection(*(set(_known(rows, pictures, list(outcomes))) for outcomes in replays))
    return [TEXT if not shown else KNOWN if index in known else NEW for index, shown in enumerate(pictures)]


def kinds_of_repeats(kinds: Iterable[str]) -> list[str]:
    """When the same is sent again to caches that have seen all of it."""
    return [TEXT if kind == TEXT else KNOWN for kind in kinds]


def _pictures_so_far(rows: Iterable[TraceRow]) -> list[frozenset[int]]:
    """Of the conversation, up to each row."""
    pictures: dict[str | None, frozenset[int]] = defaultdict(frozenset)
    so_far = []
    for row in rows:
        pictures[row.session] |= set(row.image_ids)
        so_far.append(pictures[row.session])
    return so_far


def _known(rows: Sequence[TraceRow], pictures: Sequence[frozenset[int]], outcomes: Sequence[RequestOutcome]) -> Iterator[int]:
    """Indices of requests all of whose pictures had been answered about when they were sent, of one replay."""
    answered_s: dict[int, float] = defaultdict(lambda: math.inf)  # by picture
    for outcome in outcomes:
        if outcome.error is None and outcome.first_token_s is not None:
            for picture in rows[outcome.index].image_ids:
                answered_s[picture] = min(answered_s[picture], outcome.first_token_s)
    for outcome in outcomes:
        if all(answered_s[picture] < outcome.sent_s for picture in pictures[outcome.index]):
            yield outcome.index


def figures_by_kind(
    outcomes: Iterable[RequestOutcome], kinds: Sequence[str], conditions: Conditions
) -> dict[str, ClassFigures]:
    """Of each row that has requests. kinds: by the index of a request. A request that was not answered has waited as long as
    anybody would."""
    tallies = {row: Tally() for row in (ALL, TEXT, PICTURES, KNOWN, NEW)}
    for outcome in outcomes:
        if outcome.is_warm_up:
            continue
        # A failed request tells no size to scale limits with; it has missed whatever they are
        sized = outcome if outcome.error is None else replace(outcome, num_prompt_tokens=1)
        limits = conditions.class_wide_limits(outcome), conditions.own_scaled_limits(sized)
        for row in _ROWS_OF[kinds[outcome.index]]:
            tallies[row].add(outcome, *limits)
            if outcome.error is not None:
                tallies[row].ttft_s.add(REQUEST_TIMEOUT_S)
    run_s, arrivals_s = tallies[ALL].run.length_s, tallies[ALL].arrivals.length_s
    return {row: tally.figures(row, run_s, arrivals_s) for row, tally in tallies.items() if tally.num_requests}


def flat(figures: Mapping[str, ClassFigures]) -> Iterator[tuple[str, float]]:
    """As ROW_FIGURE: latencies and use of the cache of each row, goodput of all."""
    for kind, found in figures.items():
        yield f"{kind}_requests", found.num_requests
        latencies = {"ttft": found.ttft_s, "tbt": found.tbt_request_mean_s, "e2e": found.e2e_s}
        for name, distribution in latencies.items():
            yield from _levels(f"{kind}_{name}", distribution)
        yield f"{kind}_cached_tokens_share", found.cache_use or 0.0
    whole = figures[ALL]
    for name, slo in (("own_scaled", whole.slo_own_scaled), ("class_wide", whole.slo_class_wide)):
        if slo is not None:
            yield f"attainment_{name}", slo.met
            yield f"goodput_{name}_per_s", slo.goodput_per_s
    yield "offered_per_s", whole.offered_per_s or 0.0
    yield "failed", sum(whole.errors.values())


def _levels(name: str, found: Distribution | None) -> Iterator[tuple[str, float]]:
    if found is not None:
        yield f"{name}_p50_s", found.p50
        yield f"{name}_p99_s", found.p99
