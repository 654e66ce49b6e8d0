"""Tells the form of a trace by its first line: the columns of a csv header, or the keys of a JSON object."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any

from triptych.loadgen.traces.azure_llm import AZURE_LLM
from triptych.loadgen.traces.azure_lmm import AZURE_LMM
from triptych.loadgen.traces.bailian import BAILIAN
from triptych.loadgen.traces.burstgpt import BURSTGPT
from triptych.loadgen.traces.form import Form
from triptych.loadgen.traces.mooncake import MOONCAKE
from triptych.loadgen.traces.own import OWN
from triptych.loadgen.traces.reader import Decode, csv_cells, csv_decoder, json_object
from triptych.loadgen.traces.trace import TraceError
from triptych.loadgen.undecodable import UNDECODABLE

FORMS: tuple[Form[Any], ...] = (AZURE_LMM, AZURE_LLM, MOONCAKE, BAILIAN, BURSTGPT, OWN)
MAX_SHOWN = 120  # characters of somebody's file in an error; chosen
KNOWN = "known are " + "; ".join(f"{form.name} ({', '.join(form.keys)})" for form in FORMS)


def detect(name: str, first_line: str) -> tuple[Form[Any], Decode]:
    """The form and how its lines are cut into fields. Raises TraceError with what was found and what is known."""
    is_json = first_line.startswith("{")
    try:
        keys = list(json_object(first_line)) if is_json else csv_cells(first_line)
    except (*UNDECODABLE, csv.Error) as error:
        raise TraceError(f"{name}: its first line is no {'JSON object' if is_json else 'csv header'}: {error}") from None
    fitting = [form for form in FORMS if set(form.keys) <= set(keys)]
    if not fitting:
        raise TraceError(f"{name}: {_misfit(keys, is_json)}; {KNOWN}")
    return max(fitting, key=lambda form: len(form.keys)), json_object if is_json else csv_decoder(keys)


def _misfit(keys: list[str], is_json: bool) -> str:
    closest = max(FORMS, key=lambda form: len(set(form.keys) & set(keys)))
    if set(closest.keys) & set(keys):
        return f"looks like {closest.name}, but has no {_shown(key for key in closest.keys if key not in keys)}"
    return f"its first line has the {'keys' if is_json else 'columns'} {_shown(keys)}: no known form of trace"


def _shown(names: Iterable[str]) -> str:
    text = ascii(", ".join(names))[1:-1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
