"""Opens any trace: a file of any known form, packed by gzip or not, a workload file, or a fixed workload by its name."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.workload import SUFFIX, Workload, load_workload, workload_names
from triptych.loadgen.traces.detect import detect
from triptych.loadgen.traces.reader import from_zero, in_time_order, numbered_lines, parsed
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.shaping import shaped
from triptych.loadgen.traces.trace import MalformedRows, Shaping, Trace, TraceError, TraceOptions

GZIP_MAGIC = b"\x1f\x8b"


def open_trace(path_or_name: str | Path, options: TraceOptions | None = None) -> Trace:
    """The trace, shaped by the options; only its beginning is read now. Raises TraceError, whose text is for the user."""
    options = options or TraceOptions()
    path, name = Path(path_or_name), str(path_or_name)
    if path.suffix == SUFFIX or (name in workload_names() and not path.is_file()):
        return workload_trace(name, load_workload(path_or_name), options)
    trace = _open_file(path, options)
    first = next(trace, None)
    if first is None:
        raise TraceError(f"{path.name}: {trace.form} without a row that can be used{_malformed(trace.malformed)}")
    shaping = Shaping()
    return replace(trace, rows=shaped(chain((first,), trace.rows), options, shaping), shaping=shaping)


def workload_trace(name: str, workload: Workload, options: TraceOptions) -> Trace:
    """The trace that a workload makes, which may be none that has a file. name: to be shown."""
    shaping = Shaping()
    return Trace(name, "workload", shaped(workload_rows(workload), options, shaping), MalformedRows(), shaping=shaping)


def _open_file(path: Path, options: TraceOptions) -> Trace:
    malformed = MalformedRows()
    with ExitStack() as stack:
        lines = numbered_lines(_open_binary(path, stack), malformed)
        number, first_line = next(lines, (0, ""))
        if not first_line:
            raise TraceError(f"{path.name}: holds no line that can be read{_malformed(malformed) or ', it is empty'}")
        form, decode = detect(path.name, first_line)
        if first_line.startswith("{"):
            lines = chain(((number, first_line),), lines)
        rows = parsed(lines, decode, form.parser(options), malformed)
        file = stack.pop_all()
        return Trace(path.name, form.name, _closing(from_zero(in_time_order(rows, malformed)), file), malformed, file.close)


def _malformed(rows: MalformedRows) -> str:
    return f", {rows.count} malformed; line {rows.first[0].line_number}: {rows.first[0].reason}" if rows.count else ""


def _open_binary(path: Path, stack: ExitStack) -> BinaryIO:
    try:
        file = stack.enter_context(path.open("rb"))
        is_packed = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file, and no workload: those are {', '.join(workload_names())}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=file)) if is_packed else file)


def _closing(rows: Iterator[TraceRow], stack: ExitStack) -> Iterator[TraceRow]:
    with stack:
        yield from rows
