"""What `open_trace` gives and takes: rows that stream, the form they were read from, and what could not be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from triptych.loadgen.traces.row import TraceRow

MAX_KEPT = 10  # malformed rows that are kept to be shown; chosen: all are counted
MAX_RATE_SCALE = 1000  # chosen: bounds the repeats that are held until their time comes
PAPER_MAX_IMAGES = 16  # ModServe (arXiv 2502.00937) replays requests of 0 to 16 pictures

ImageCount = Literal["sqrt", "raw"]


class TraceError(Exception):
    """A trace that cannot be read at all; the text is one line for the user: what was found, what is known."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How rows become a schedule, applied in this order; times are the trace's own until speed_up divides them.

    image_count: how Azure LMM's NumImages is read, whose values are squares. start_s, duration_s: only rows of that window,
    which then begins at 0. text_rate_scale, image_rate_scale: below 1 a seeded draw drops requests, above 1 repeats follow
    within repeat_within_s. max_images: a request with more has this many; None: no cap. limit: at most so many rows.
    """

    image_count: ImageCount = "sqrt"
    start_s: float = 0.0
    duration_s: float | None = None
    text_rate_scale: float = 1.0
    image_rate_scale: float = 1.0
    speed_up: float = 1.0
    max_images: int | None = PAPER_MAX_IMAGES
    limit: int | None = None
    seed: int = 0
    repeat_within_s: float = 5.0  # chosen: several gaps of the Azure LMM trace, less than a burst of it

    def __post_init__(self) -> None:
        if self.image_count not in get_args(ImageCount):
            raise TraceError(f"image count {self.image_count!r}: it is read as {' or '.join(get_args(ImageCount))}")
        for name in ("speed_up", "duration_s"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise TraceError(f"{name} {value:g}: a number above 0 is needed")
        for name in ("start_s", "repeat_within_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TraceError(f"{name} {getattr(self, name):g}: 0 or more is needed")
        for name in ("text_rate_scale", "image_rate_scale"):
            if not 0 <= getattr(self, name) <= MAX_RATE_SCALE:
                raise TraceError(f"{name} {getattr(self, name):g}: 0 to {MAX_RATE_SCALE} is possible")


@dataclass(frozen=True, slots=True)
class MalformedRow:
    """line_number: from 1, the header counts."""

    line_number: int
    reason: str


@dataclass(slots=True)
class MalformedRows:
    """Rows that were left out so far: all are counted, the first few are kept."""

    count: int = 0
    first: list[MalformedRow] = field(default_factory=list)

    def add(self, line_number: int, reason: str) -> None:
        self.count += 1
        if len(self.first) < MAX_KEPT:
            self.first.append(MalformedRow(line_number, reason))


@dataclass(slots=True)
class Shaping:
    """While rows are shaped. num_capped_rows: those with more pictures than the cap; num_images_left_out: of theirs.
    is_stopped: set, in any thread, by whoever wants no more rows, even if the next one is far away."""

    num_capped_rows: int = 0
    num_images_left_out: int = 0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Trace(Iterator[TraceRow]):
    """Rows in order of arrival_s, read while they are asked for, once. malformed and shaping fill while rows are read. close:
    for whoever does not read them all.

    name: the file's or workload's, to be shown. form: azure-llm, azure-lmm, mooncake, bailian, burstgpt, triptych, workload.
    """

    name: str
    form: str
    rows: Iterator[TraceRow]
    malformed: MalformedRows
    close: Callable[[], None] = lambda: None
    shaping: Shaping = field(default_factory=Shaping)

    def __next__(self) -> TraceRow:
        return next(self.rows)
