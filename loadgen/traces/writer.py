"""Writes rows as a trace file: `.jsonl` is our own form, `.csv` that of Azure LMM; with `.gz` behind it packed."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from triptych.loadgen.traces.azure_lmm import COLUMNS, azure_lmm_line
from triptych.loadgen.traces.own import own_line
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceError


def write_trace(rows: Iterable[TraceRow], path: Path) -> None:
    """The same rows, the same bytes; the whole file or nothing. Azure's form holds neither sessions nor prefixes.

    Raises:
        TraceError: it can't be written, or has a name of neither form.
    """
    name = path.name.removesuffix(".gz")
    if not name.endswith((".csv", ".jsonl")):
        raise TraceError(f"{path.name}: the name of a trace ends in .csv or .jsonl, or in one of them and .gz")
    is_own = name.endswith(".jsonl")
    line = own_line if is_own else azure_lmm_line
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            file = _open(new, stack, is_packed=path.name.endswith(".gz"))
            if not is_own:
                file.write(",".join(COLUMNS) + "\n")
            file.writelines(line(row) + "\n" for row in rows)
        new.replace(path)
    except OSError as error:
        raise TraceError(f"{error.filename or path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _open(path: Path, stack: ExitStack, is_packed: bool) -> TextIO:
    """No time of writing and no name in a .gz, so that equal rows give equal files."""
    raw = stack.enter_context(path.open("wb"))
    file = cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)) if is_packed else raw
    return stack.enter_context(io.TextIOWrapper(file, encoding="utf-8", newline="\n"))
