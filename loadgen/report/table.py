"""The report on a terminal: one short table, what to know before believing it, how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.loadgen.report.figures import LATENCIES, SLOS, num_failed, of_known
from triptych.loadgen.report.schema import ClassFigures, Report
from triptych.shared.units import NOTHING, duration, number, plain, share

NAME_WIDTH, CLASS_WIDTH = 25, 18  # columns: all, text and image on a terminal of 80; more where there is room


def print_report(report: Report, console: Console) -> None:
    """Print it. What has no room is on the page."""
    classes = report.classes[: max(1, (console.width - NAME_WIDTH) // CLASS_WIDTH)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    # In the table, so that nobody copies figures without it
    table.add_column("" if report.is_real else Text(plain(report.label), style="bold yellow"), no_wrap=True)
    for figures in classes:
        table.add_column(Text(plain(figures.name)), justify="right", no_wrap=True)
    for name, cells in _rows(classes):
        if set(cells) != {NOTHING}:
            table.add_row(name, *cells)
    console.print(Text(plain(f"{report.headline}, {duration(report.span_s)}"), style="bold"), soft_wrap=True)
    console.print(table)
    for line, style in _lines(report):
        console.print(Text(plain(line), style=style), soft_wrap=True)


def _rows(classes: Sequence[ClassFigures]) -> Iterator[tuple[str, list[str]]]:
    yield "requests", [number(figures.num_requests) for figures in classes]
    yield "failed", [number(num_failed(figures) or None) for figures in classes]
    yield "cancelled", [number(figures.num_cancelled or None) for figures in classes]
    yield "unfinished", [number(figures.num_unfinished or None) for figures in classes]
    yield "offered, finished /s", [f"{number(figures.offered_per_s)}, {number(figures.finished_per_s)}" for figures in classes]
    yield "output tokens/s", [number(figures.output_tokens_per_s) for figures in classes]
    for latency in LATENCIES:
        found = [latency.of(figures) for figures in classes]
        yield f"{latency.title} p50, p99", [f"{duration(one.p50)}, {duration(one.p99)}" if one else NOTHING for one in found]
    for slo in SLOS:
        met = [slo.of(figures) for figures in classes]
        yield f"{slo.title}, goodput", [f"{share(one.met)}, {number(one.goodput_per_s)}/s" if one else NOTHING for one in met]
    yield "prompt tokens cached", [share(figures.cache_use) for figures in classes]
    yield "answers right", [of_known(figures) for figures in classes]


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    """Lines below the table, and their styles."""
    for warning in report.warnings:
        yield f"! {warning}", "yellow"
    errors = report.classes[0].errors
    if errors:
        yield f"failed: {', '.join(f'{kind} {number(count)}' for kind, count in errors.items())}", "red"
    if report.warm_up is not None:
        yield f"warm-up, in no figure: {number(report.warm_up.num_requests)} requests", "dim"
    lag = report.send_lag_s
    if lag is not None:
        spread = f"mean {duration(lag.mean)}, p50 {duration(lag.p50)}, p99 {duration(lag.p99)}, max {duration(lag.max)}"
        yield f"send lag: {spread}", "dim"
    yield report.origin, "dim"
