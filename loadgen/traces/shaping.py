"""Makes a schedule of a trace's rows: a window, rates of the classes, speed, a cap on pictures. Pure, streaming, seeded."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice, takewhile
from random import Random

from triptych.loadgen.traces.form import SessionStates
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import Shaping, TraceOptions

COPY_SHIFT = 48  # bits; chosen: ids of the published traces stay below, and copies of ids in the 64 bits that JSON carries


def shaped(rows: Iterator[TraceRow], options: TraceOptions, shaping: Shaping | None = None) -> Iterator[TraceRow]:
    """shaping: filled as rows are read."""
    told = shaping or Shaping()
    rows = takewhile(lambda _: not told.is_stopped, rows)
    if options.start_s or options.duration_s is not None:
        rows = window(rows, options.start_s, options.duration_s)
    rates = {"text": options.text_rate_scale, "image": options.image_rate_scale}
    if set(rates.values()) != {1.0}:
        rows = rate_scaled(rows, rates, options.repeat_within_s, options.seed)
    if options.speed_up != 1.0:
        rows = sped_up(rows, options.speed_up)
    if options.max_images is not None:
        rows = with_at_most_images(rows, options.max_images, told)
    return islice(rows, options.limit)


def with_at_most_images(rows: Iterator[TraceRow], max_images: int, shaping: Shaping) -> Iterator[TraceRow]:
    """Pictures too many are left out and counted; their tokens as well, where the row tells them."""
    for row in rows:
        if row.num_images <= max_images:
            yield row
            continue
        shaping.num_capped_rows += 1
        shaping.num_images_left_out += row.num_images - max_images
        if row.num_image_tokens is None:
            yield replace(row, num_images=max_images, image_ids=row.image_ids[:max_images])
        else:
            num_image_tokens = row.num_image_tokens * max_images // row.num_images
            num_context_tokens = max(0, row.num_context_tokens - row.num_image_tokens + num_image_tokens)
            yield replace(
                row,
                num_images=max_images,
                num_image_tokens=num_image_tokens,
                num_context_tokens=num_context_tokens,
                image_ids=row.image_ids[:max_images],
            )


def window(rows: Iterator[TraceRow], start_s: float, duration_s: float | None) -> Iterator[TraceRow]:
    """Rows of [start_s, start_s + duration_s), with times counted from start_s."""
    for row in rows:
        if duration_s is not None and row.arrival_s >= start_s + duration_s:
            return
        if row.arrival_s >= start_s:
            yield replace(row, arrival_s=row.arrival_s - start_s)


def rate_scaled(rows: Iterator[TraceRow], rates: Mapping[str, float], within_s: float, seed: int) -> Iterator[TraceRow]:
    """Each row becomes floor(rate + u) rows, u uniform: none, itself, or itself and copies up to within_s later.

    Classes are drawn apart. A conversation is kept, dropped and copied as a whole: all its rows count as of the class of the
    first one, and see the same u and delays.
    Copies are users of their own, with names, pictures and prefix ids of their own: all repeats as often as in the trace.
    """
    draws = {name: Random(f"{seed} {name}") for name in rates}
    pending: list[tuple[float, int, TraceRow]] = []
    order = count()
    classes: SessionStates[str] = SessionStates()
    for row in rows:
        request_class, rng = row.request_class, draws[row.request_class]
        if row.session is not None:
            request_class, rng = classes.get(row.session, row.request_class), Random(f"{seed} {row.session}")
            classes.remember(row.session, request_class)
        for copy in range(int(rates[request_class] + rng.random())):
            made = _copy(row, copy, rng.uniform(0, within_s)) if copy else row
            heapq.heappush(pending, (made.arrival_s, next(order), made))
        while pending and pending[0][0] <= row.arrival_s:
            yield heapq.heappop(pending)[2]
    for _, _, row in sorted(pending):
        yield row


def _copy(row: TraceRow, copy: int, delay_s: float) -> TraceRow:
    return replace(
        row,
        arrival_s=row.arrival_s + delay_s,
        session=None if row.session is None else f"{row.session}~{copy}",
        prefix_ids=tuple(name ^ copy << COPY_SHIFT for name in row.prefix_ids),
        image_ids=tuple(name ^ copy << COPY_SHIFT for name in row.image_ids),
    )


def sped_up(rows: Iterator[TraceRow], factor: float) -> Iterator[TraceRow]:
    """factor 2: twice as fast, at twice the rate."""
    for row in rows:
        yield replace(row, arrival_s=row.arrival_s / factor)
