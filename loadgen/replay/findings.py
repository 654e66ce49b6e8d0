"""The conditions of a replay as they become known: before it, from the target, from the requests. `run.py` writes them down."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata

import aiohttp

from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.content import Content, TraceContent
from triptych.loadgen.replay.open_loop import MAX_OPEN, OpenLoop
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.prepare import Prepared
from triptych.loadgen.traces.trace import Trace
from triptych.shared.units import plain


def begun(trace: Trace, options: ReplayOptions) -> Conditions:
    versions = {"triptych": metadata.version("triptych"), "aiohttp": aiohttp.__version__, "python": platform.python_version()}
    return Conditions(
        target=plain(options.target),
        model=plain(options.model or ""),
        label="real",
        versions=versions,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        trace=plain(trace.name),
        trace_form=trace.form,
        seed=options.send.seed,
        options=options.as_given,
        slos=options.slos,
        isolated=options.isolated,
        warm_up_s=options.send.warm_up_s,
    )


def with_prepared(conditions: Conditions, prepared: Prepared) -> Conditions:
    return replace(
        conditions,
        model=plain(prepared.target.model),
        label=prepared.target.label,
        versions={**conditions.versions, "server": prepared.target.version},
        tokens_per_word=None if prepared.costs is None else prepared.costs.per_word,
        isolated=prepared.isolated,
        notes=prepared.notes,
    )


def with_told(conditions: Conditions, content: Content, loop: OpenLoop) -> Conditions:
    """What the trace's requests came to, besides their outcomes."""
    return replace(conditions, notes=(*conditions.notes, *_notes(content, loop)))


def _notes(content: Content, loop: OpenLoop) -> Iterator[str]:
    if isinstance(content, TraceContent) and content.num_cut:
        yield f"{content.num_cut:,} requests were longer than the model's context and were cut to fit."
    if isinstance(content, TraceContent) and content.num_longer:
        why = "their pictures, what was said before, or the chat template take more tokens than the trace has in all"
        yield f"{content.num_longer:,} prompts are longer than in the trace: {why}."
    if loop.was_full:
        yield f"{MAX_OPEN:,} requests were open at once; others waited for them to end, and were sent late or not at all."


def with_read(conditions: Conditions, trace: Trace) -> Conditions:
    """What could not be read of the trace, and what was left out of it."""
    first = tuple(f"line {row.line_number}: {row.reason}" for row in trace.malformed.first)
    notes = conditions.notes
    if trace.shaping.num_capped_rows:
        num_left_out = f"{trace.shaping.num_images_left_out:,} pictures of {trace.shaping.num_capped_rows:,} requests"
        notes = (*notes, f"{num_left_out} were left out: these have more in the trace than --max-images allows.")
    return replace(conditions, notes=notes, num_malformed_rows=trace.malformed.count, malformed_rows=first)
