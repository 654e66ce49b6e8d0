"""`loadgen report` and `loadgen compare`: options in, a report or a comparison out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from triptych.loadgen.report.compare import compare, print_comparison
from triptych.loadgen.report.results import ReportFailed, make_report, read_report, write_report
from triptych.loadgen.report.schema import Report
from triptych.loadgen.report.table import print_report
from triptych.shared.console import progress_console, table_console
from triptych.shared.units import plain

FAILED_STATUS = 2

AsJson = Annotated[bool, typer.Option("--json", help="one JSON object as the last line")]


def publish(folder: Path) -> Report:
    """Make the report of a results folder, write its files there, and print it.

    Raises:
        ReportFailed: it is no results folder, or cannot be written to.
    """
    console = table_console()
    with progress_console().status("Making the report ..."):  # of a million requests it takes a minute
        report = make_report(folder)
    try:
        files = write_report(report, folder)
    finally:
        print_report(report, console)  # also what cannot be written
    names = (plain(str(file)) for file in files)
    console.print(*names, style="dim", markup=False, highlight=False, soft_wrap=True)
    return report


def report_command(
    results: Annotated[Path, typer.Argument(help="the folder that `loadgen replay` wrote to")], as_json: AsJson = False
) -> None:
    """Figures of a replay, again: a table here, and report.json, report.csv and report.html in its folder."""
    with _failing():
        report = publish(results)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


def compare_command(
    a: Annotated[Path, typer.Argument(help="a results folder, or a report.json")],
    b: Annotated[Path, typer.Argument(help="another one")],
    as_json: AsJson = False,
) -> None:
    """Two replays side by side: B's figures over A's, and which conditions differ."""
    with _failing():
        comparison = compare(read_report(a), read_report(b))
    print_comparison(comparison, table_console())
    if as_json:
        sys.stdout.write(msgspec.json.encode(comparison).decode() + "\n")


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command("report")(report_command)
    app.command("compare")(compare_command)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except ReportFailed as error:
        sys.stderr.write(f"{plain(str(error))}\n")
        raise typer.Exit(FAILED_STATUS) from None
