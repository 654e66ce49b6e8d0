"""Our own form: jsonl, each line a TraceRow by the names of its fields, without those that are at their default."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import msgspec

from triptych.loadgen.traces.form import Form
from triptych.loadgen.traces.row import TraceRow

_DEFAULTS = {field.name: field.default for field in fields(TraceRow)}


def own_line(row: TraceRow) -> str:
    """Times are kept to the microsecond."""
    values = {name: getattr(row, name) for name in _DEFAULTS}
    values["arrival_s"] = round(row.arrival_s, 6)
    return msgspec.json.encode({name: value for name, value in values.items() if value != _DEFAULTS[name]}).decode()


OWN = Form(
    "triptych",
    tuple(name for name, default in _DEFAULTS.items() if default is MISSING),
    TraceRow,
    lambda _options: lambda row: row if row.session != "" else replace(row, session=None),  # "": an empty cell of a csv
)
