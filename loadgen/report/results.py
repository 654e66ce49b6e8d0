"""The results folder of a replay: outcomes and conditions in, the report's files out. A run that was cut off has one, too."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec

from triptych.loadgen.replay.conditions import OUTCOMES_FILE, read_conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.builder import ReportBuilder
from triptych.loadgen.report.figures import flat_figures
from triptych.loadgen.report.page import page
from triptych.loadgen.report.schema import VERSION, Report
from triptych.loadgen.undecodable import UNDECODABLE

REPORT_FILES = REPORT_FILE, TABLE_FILE, PAGE_FILE = "report.json", "report.csv", "report.html"
UNREADABLE = (OSError, *UNDECODABLE)


class ReportFailed(Exception):
    """There is nothing to report from, with the reason for a user."""


class OutcomesReader:
    """Yields the outcomes of a file, one in memory at a time, and remembers what was none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bad = 0
        self._first_bad = 0
        self._is_cut_off = False

    def __iter__(self) -> Iterator[RequestOutcome]:
        decoder = msgspec.json.Decoder(RequestOutcome)
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield decoder.decode(line)
                except UNDECODABLE:
                    self._is_cut_off = not line.endswith(b"\n")
                    if not self._is_cut_off:
                        self._num_bad += 1
                        self._first_bad = self._first_bad or number

    def notes(self) -> Iterator[str]:
        """For the report, once all is read."""
        if self._num_bad:
            yield f"{self._num_bad:,} lines of {self._path.name} are no outcomes, the first is line {self._first_bad}."
        if self._is_cut_off:
            yield f"The last line of {self._path.name} is cut off and was left out."


def make_report(folder: Path) -> Report:
    """From the conditions and outcomes in a results folder.

    Raises:
        ReportFailed: it is none.
    """
    try:
        builder = ReportBuilder(read_conditions(folder))
        outcomes = OutcomesReader(folder / OUTCOMES_FILE)
        for outcome in outcomes:
            builder.add(outcome)
    except UNREADABLE as error:
        raise ReportFailed(f"{str(folder)!r} is no results folder of `loadgen replay`: {error}") from None
    return builder.report(outcomes.notes())


def write_report(report: Report, folder: Path) -> list[Path]:
    """As JSON, as CSV with a line for each class, and as a page. Returns the files.

    Raises:
        ReportFailed: the folder cannot be written to.
    """
    texts = {
        REPORT_FILE: msgspec.json.encode(report).decode() + "\n",
        TABLE_FILE: _csv(report),
        PAGE_FILE: page(report),
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ReportFailed(f"the report cannot be written: {error}") from None
    return [folder / name for name in texts]


def read_report(path: Path) -> Report:
    """Of a results folder, or a report.json that was taken out of one.

    Raises:
        ReportFailed: it is neither, or of another version.
    """
    try:
        report = msgspec.json.decode((path / REPORT_FILE if path.is_dir() else path).read_bytes(), type=Report)
        if report.version == VERSION:
            return report
        reason = f"it is of version {report.version}, not {VERSION}"
    except UNREADABLE as error:
        reason = str(error)
    if path.is_dir():
        return make_report(path)
    raise ReportFailed(f"{str(path)!r} is no report of `loadgen replay` that can be read: {reason}")


def _csv(report: Report) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["label", "class", *flat_figures(report.classes[0])])
    rows.writerows([report.label, figures.name, *flat_figures(figures).values()] for figures in report.every_class)
    return out.getvalue()
