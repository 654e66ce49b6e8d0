"""The requests of bench cluster: `workloads/chat-reuse` at any rate, what each is to a cache, and the figures of each kind.

What is known is told by the requests themselves - which conversation, which pictures - and not by the servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.schema import ClassFigures, Distribution
from triptych.loadgen.report.tally import Tally
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.scaling import Wishes, as_wished
from triptych.loadgen.synth.workload import load_workload
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.shaping import sped_up

WORKLOAD = "chat-reuse"
ALL, TEXT, KNOWN, NEW = "all", "text", "known_pictures", "new_pictures"
KINDS = (TEXT, KNOWN, NEW)
# People answer four times as quickly as the workload has it (chosen): a conversation takes 15 s instead of a minute, so that a
# run of a minute and a half is not mostly its beginning, when all conversations are new.
HASTE = 4.0
MAX_IMAGES = 2  # of a prompt, in this workload


def rows_at(rate_per_s: float, duration_s: float, seed: int) -> list[TraceRow]:
    """rate_per_s: of requests, once as many conversations end as begin."""
    wishes = Wishes(duration_s=duration_s * HASTE, rate_per_s=rate_per_s / HASTE, seed=seed)
    return list(sped_up(workload_rows(as_wished(load_workload(WORKLOAD), wishes)), HASTE))


def kinds_of(rows: Iterable[TraceRow]) -> Iterator[str]:
    """Of a server that has seen none of them: by the pictures of the whole conversation."""
    seen: set[int] = set()
    with_pictures: set[str | None] = set()
    for row in rows:
        if row.num_images:
            with_pictures.add(row.session)
            yield KNOWN if seen.issuperset(row.image_ids) else NEW
            seen.update(row.image_ids)
        else:
            yield KNOWN if row.session in with_pictures else TEXT


def figures_by_kind(
    outcomes: Iterable[RequestOutcome], kinds: Sequence[str], conditions: Conditions
) -> dict[str, ClassFigures]:
    """kinds: by the index of a request. A request that was not answered has waited as long as anybody would."""
    tallies = {kind: Tally() for kind in KINDS}
    for outcome in outcomes:
        if outcome.is_warm_up:
            continue
        tally = tallies[kinds[outcome.index]]
        # A failed request tells no size to scale limits with; it has missed whatever they are
        sized = outcome if outcome.error is None else replace(outcome, num_prompt_tokens=1)
        tally.add(outcome, conditions.class_wide_limits(outcome), conditions.own_scaled_limits(sized))
        if outcome.error is not None:
            tally.ttft_s.add(REQUEST_TIMEOUT_S)
    whole = Tally()
    for tally in tallies.values():
        whole += tally
    every = {ALL: whole} | {kind: tally for kind, tally in tallies.items() if tally.num_requests}
    return {name: tally.figures(name, whole.run.length_s, whole.arrivals.length_s) for name, tally in every.items()}


def flat(figures: Mapping[str, ClassFigures]) -> Iterator[tuple[str, float]]:
    """As KIND_FIGURE: latencies and use of the cache of each kind, goodput of all."""
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
