"""The figures of a class under flat names, and how people call them: for the table, the CSV, the page and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from triptych.loadgen.report.schema import Attainment, ClassFigures, Distribution
from triptych.shared.units import NOTHING, share


class Latency(NamedTuple):
    """A latency: its field in ClassFigures, its title, and what exactly it is."""

    field: str
    title: str
    meaning: str

    def of(self, figures: ClassFigures) -> Distribution | None:
        found: Distribution | None = getattr(figures, self.field)
        return found


class SloKind(NamedTuple):
    """Its field in ClassFigures, its title, and what it says."""

    field: str
    title: str
    meaning: str

    def of(self, figures: ClassFigures) -> Attainment | None:
        found: Attainment | None = getattr(figures, self.field)
        return found


LATENCIES = (
    Latency("ttft_s", "TTFT", "from the scheduled time to the first token"),
    Latency("tbt_over_tokens_s", "TBT over tokens", "each gap between two chunks with content counts"),
    Latency("tbt_request_mean_s", "TBT request mean", "each request counts once, with its mean"),
    Latency("e2e_s", "E2E", "from the scheduled time to the last token"),
    Latency("input_s_per_token", "Normalised input", "TTFT / prompt tokens"),
    Latency("output_s_per_token", "Normalised output", "decode time / output tokens"),
)
SLOS = (
    SloKind("slo_class_wide", "SLO class-wide", "one limit for all requests of a class"),
    SloKind("slo_own_scaled", "SLO own-scaled", "limits grow with what a request's own size takes when alone"),
)
SPREAD = ("mean", "p50", "p90", "p95", "p99", "max")
_PLAIN = tuple(
    name
    for name in ClassFigures.__struct_fields__
    if name not in {"name", "errors", *(known.field for known in (*LATENCIES, *SLOS))}
)


def num_failed(figures: ClassFigures) -> int:
    return sum(figures.errors.values())


def flat_figures(figures: ClassFigures) -> dict[str, float | None]:
    """Every number, by names such as ttft_s.p99; the names are the same for every class and report."""
    found: dict[str, float | None] = {name: getattr(figures, name) for name in _PLAIN}
    found["num_failed"] = num_failed(figures)
    for latency in LATENCIES:
        found |= {f"{latency.field}.{name}": part(latency.of(figures), name) for name in ("count", *SPREAD)}
    for slo in SLOS:
        found |= {f"{slo.field}.{name}": part(slo.of(figures), name) for name in Attainment.__struct_fields__}
    return found


def part(found: Distribution | Attainment | None, name: str) -> float | None:
    """A number of it by its name; None where there is nothing."""
    value: float | None = None if found is None else getattr(found, name)
    return value


def of_known(figures: ClassFigures) -> str:
    """How many of the known answers were right."""
    if not figures.num_answers_known:
        return NOTHING
    return share(figures.num_answers_right / figures.num_answers_known)


def flat_conditions(conditions: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names such as options.rate, and values as text; what is empty is left out."""
    for name, value in conditions.items():
        if isinstance(value, Mapping):
            yield from flat_conditions(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value not in (None, ""):
            yield f"{prefix}{name}", f"{value:g}" if isinstance(value, float) else str(value)
