"""Opens any trace: a file of any known form, or a fixed workload by its name."""

from __future__ import annotations

from pathlib import Path

from triptych.loadgen.traces.trace import Trace, TraceOptions


def open_trace(path_or_name: str | Path, options: TraceOptions | None = None) -> Trace:
    """The trace, shaped by the options; nothing is read but its beginning. Raises TraceError, whose text is for the user."""
    raise NotImplementedError
