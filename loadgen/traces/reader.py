"""Lines of a file to rows in order of time, in constant memory; what cannot be read is counted and left out."""

from __future__ import annotations

import csv
import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec

from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import MalformedRows
from triptych.loadgen.undecodable import UNDECODABLE

MAX_LINE_BYTES = 4 << 20  # chosen: a prompt of a million tokens in blocks of 16 takes 1.3 MB at most
MAX_COUNT = 10_000_000  # tokens, pictures; chosen: beyond every model's context
MAX_ID_BITS = 63  # of a prefix block's or picture's name: what JSON's readers agree on
REORDER_ROWS = 1000  # chosen: rows this far out of place are put in order
_DAMAGED = (EOFError, zlib.error, OSError)  # what a cut or broken .gz raises

Parse = Callable[[Mapping[str, Any]], TraceRow]
Decode = Callable[[str], Mapping[str, Any]]


def numbered_lines(file: BinaryIO, malformed: MalformedRows) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1. A damaged end and lines that are far too long count as malformed."""
    number, goes_on = 0, False
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES)
        except _DAMAGED as error:
            malformed.add(number + 1, f"the file cannot be read from here on: {error}")
            return
        if not line:
            return
        was_going_on, goes_on = goes_on, len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
        if was_going_on:
            continue
        number += 1
        if goes_on:
            malformed.add(number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
        elif text := line.decode("utf-8-sig", errors="replace").strip():
            yield number, text


def csv_cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader((line,), strict=True))]


def csv_decoder(header: list[str]) -> Decode:
    def decode(line: str) -> Mapping[str, str]:
        cells = csv_cells(line)
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} values, the header has {len(header)}")
        return dict(zip(header, cells, strict=True))

    return decode


def json_object(line: str) -> Mapping[str, Any]:
    return msgspec.json.decode(line, type=dict[str, Any])


def parsed(
    lines: Iterator[tuple[int, str]], decode: Decode, parse: Parse, malformed: MalformedRows
) -> Iterator[tuple[int, TraceRow]]:
    """Rows with their lines' numbers; arrival_s is still the trace's own clock."""
    for number, line in lines:
        try:
            row = _checked(parse(decode(line)))
        except (*UNDECODABLE, OverflowError, csv.Error) as error:
            malformed.add(number, str(error))
        else:
            yield number, row


def _checked(row: TraceRow) -> TraceRow:
    """An empty answer becomes one token: its prompt had to be read all the same, and no server is asked for none."""
    if not math.isfinite(row.arrival_s):
        raise ValueError("its time is no number")
    counts = (row.num_context_tokens, row.num_output_tokens, row.num_images, row.num_image_tokens or 0, row.turn)
    if not all(0 <= count <= MAX_COUNT for count in (*counts, row.prefix_block_size)):
        raise ValueError(f"a count is not within 0 and {MAX_COUNT}")
    for what, names in (("prefix block", row.prefix_ids), ("picture", row.image_ids)):
        if names and (min(names) < 0 or max(names) >> MAX_ID_BITS):
            raise ValueError(f"the name of a {what} is not within 0 and 2^{MAX_ID_BITS}")
    if row.image_ids and len(row.image_ids) != row.num_images:
        raise ValueError(f"{len(row.image_ids)} names of pictures where there are {row.num_images}")
    return row if row.num_output_tokens else replace(row, num_output_tokens=1)


def in_time_order(rows: Iterator[tuple[int, TraceRow]], malformed: MalformedRows) -> Iterator[TraceRow]:
    """Sorts what is up to REORDER_ROWS out of place; what is further off is left out, as its time is over by then."""
    waiting: list[tuple[float, int, TraceRow]] = []
    released_s = -math.inf
    for number, row in rows:
        if row.arrival_s < released_s:
            malformed.add(number, f"{released_s - row.arrival_s:g} s before rows that are far above it: sort the file by time")
            continue
        heapq.heappush(waiting, (row.arrival_s, number, row))
        if len(waiting) > REORDER_ROWS:
            released_s, _, first = heapq.heappop(waiting)
            yield first
    for _, _, row in sorted(waiting):
        yield row


def from_zero(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Times counted from the first row's."""
    begin_s: float | None = None
    for row in rows:
        begin_s = row.arrival_s if begin_s is None else begin_s
        yield replace(row, arrival_s=row.arrival_s - begin_s)
