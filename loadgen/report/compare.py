"""Two reports side by side: B's figures over A's, class by class, and which of the conditions differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.loadgen.report.builder import ALL
from triptych.loadgen.report.figures import LATENCIES, SLOS, flat_conditions, flat_figures
from triptych.loadgen.report.schema import REAL, Report
from triptych.shared.units import NOTHING, duration, number, plain, share

VERSION = 1
SIDES_WIDTH, RATIO_WIDTH = 48, 16  # columns; classes without room are in the JSON only
# They say how a run went, not what was asked of it: two runs always differ in them
OUTCOMES = {"started_at", "ended", "message", "notes", "error_examples", "malformed_rows", "isolated"}
# Where results went makes no difference, and the others are conditions by themselves
REPEATED_OPTIONS = {f"options.{name}" for name in ("out", "target", "trace", "seed", "model")}
SAME = 0.02  # ratios so close to 1 are not coloured; chosen


class Shown(NamedTuple):
    """A row of the table: a figure of flat_figures, its title, how it is written. is_less_better None: neither is better."""

    figure: str
    title: str
    write: Callable[[float | None], str]
    is_less_better: bool | None


ROWS = (
    Shown("num_requests", "requests", number, None),
    Shown("num_failed", "failed", number, True),
    Shown("finished_per_s", "finished/s", number, False),
    Shown("output_tokens_per_s", "output tokens/s", number, False),
    *(
        Shown(f"{latency.field}.{part}", f"{latency.title}, {part}", duration, True)
        for latency in LATENCIES
        for part in ("mean", "p50", "p99")
    ),
    *(Shown(f"{slo.field}.met", slo.title, share, False) for slo in SLOS),
    *(Shown(f"{slo.field}.goodput_per_s", f"{slo.title}, goodput/s", number, False) for slo in SLOS),
    Shown("cache_use", "prompt tokens cached", share, False),
)


class Ratio(msgspec.Struct, frozen=True):
    """A figure in both; ratio is B / A, None where A is 0."""

    a: float
    b: float
    ratio: float | None


class Difference(msgspec.Struct, frozen=True):
    """A condition that is not the same in both; None: it is only in the other."""

    name: str
    a: str | None
    b: str | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `loadgen compare --json` prints. ratios: by class, by figure. warnings_a, warnings_b: of one of the reports only."""

    version: int = VERSION
    label_a: str
    label_b: str
    differences: list[Difference]
    warnings_a: list[str]
    warnings_b: list[str]
    ratios: dict[str, dict[str, Ratio]]


def compare(a: Report, b: Report) -> Comparison:
    """B over A, in the classes and figures that both have."""
    of_b = {figures.name: flat_figures(figures) for figures in b.classes}
    ratios = {
        figures.name: {
            name: Ratio(value, other, other / value if value else None)
            for name, value in flat_figures(figures).items()
            if value is not None and (other := of_b[figures.name][name]) is not None
        }
        for figures in a.classes
        if figures.name in of_b
    }
    return Comparison(
        label_a=a.label,
        label_b=b.label,
        differences=list(_differences(a, b)),
        warnings_a=[warning for warning in a.warnings if warning not in b.warnings],
        warnings_b=[warning for warning in b.warnings if warning not in a.warnings],
        ratios=ratios,
    )


def _differences(a: Report, b: Report) -> Iterator[Difference]:
    in_a, in_b = (
        dict(flat_conditions({name: value for name, value in report.conditions.items() if name not in OUTCOMES}))
        for report in (a, b)
    )
    for name in in_a | in_b:
        if name not in REPEATED_OPTIONS and in_a.get(name) != in_b.get(name):
            yield Difference(name, in_a.get(name), in_b.get(name))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """As a table: A and B of all requests, and B / A of each class; then which conditions differ."""
    labels = (comparison.label_a, comparison.label_b)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for side, label in zip("AB", labels, strict=True):
        table.add_column(Text(plain(side if label == REAL else f"{side}, {label}")), justify="right", no_wrap=True)
    names = list(comparison.ratios)[: max(1, (console.width - SIDES_WIDTH) // RATIO_WIDTH)]
    for name in names:
        table.add_column(Text(plain(f"B/A {name}")), justify="right", no_wrap=True)
    for row in ROWS:
        whole = comparison.ratios.get(ALL, {}).get(row.figure)
        if whole is not None:
            ratios = (_shown_ratio(comparison.ratios[name].get(row.figure), row) for name in names)
            table.add_row(row.title, row.write(whole.a), row.write(whole.b), *ratios)
    console.print(table)
    for difference in comparison.differences:
        line = f"{difference.name}: {difference.a or NOTHING} in A, {difference.b or NOTHING} in B"
        console.print(Text(plain(line), style="yellow"), soft_wrap=True)
    for side, warnings in (("A", comparison.warnings_a), ("B", comparison.warnings_b)):
        for warning in warnings:
            console.print(Text(plain(f"! {side}: {warning}"), style="yellow"), soft_wrap=True)
    if not comparison.differences:
        console.print(Text("same conditions", style="dim"))


def _shown_ratio(found: Ratio | None, row: Shown) -> Text:
    if found is None or found.ratio is None:
        return Text(NOTHING)
    ratio = found.ratio
    if row.is_less_better is None or abs(ratio - 1) <= SAME:
        return Text(number(ratio))
    return Text(number(ratio), style="green" if (ratio < 1) == row.is_less_better else "red")
