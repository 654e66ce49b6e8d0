"""A results folder becomes a report, whatever became of the run: `loadgen report`, its files, their documented form."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from support.replay_results import CONDITIONS, answered, failed, write_results
from triptych.loadgen.cli import main
from triptych.loadgen.report.results import ReportFailed, make_report, read_report, write_report
from triptych.loadgen.report.schema import VERSION, Report

SCHEMA = Path(__file__).parents[3] / "docs" / "report.schema.json"
OUTCOMES = [answered(float(at_s), 0.2, [0.01, 0.02], num_images=at_s % 3) for at_s in range(20)]


def test_the_command_prints_the_figures_and_writes_three_files(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(write_results(tmp_path, OUTCOMES)), "--json"])
    assert done.exit_code == 0, done.output
    assert "TTFT p50, p99" in done.output
    assert "200 ms, 200 ms" in done.output
    assert msgspec.json.decode(done.output.splitlines()[-1], type=Report) == read_report(tmp_path)
    assert {path.name for path in tmp_path.glob("report.*")} == {"report.json", "report.csv", "report.html"}


def test_the_schema_is_the_documented_one() -> None:
    """If only fields were added, write the text below to docs/report.schema.json; otherwise VERSION is one more as well."""
    schema = json.dumps(msgspec.json.schema(Report), indent=1)
    assert json.loads(SCHEMA.read_text()) == json.loads(schema), schema


def test_csv_has_a_line_for_each_class_and_as_many_cells(tmp_path: Path) -> None:
    warm_up = replace(OUTCOMES[0], is_warm_up=True)
    report = make_report(write_results(tmp_path, [*OUTCOMES, warm_up]))
    write_report(report, tmp_path)
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["all", "text", "image", "1 picture", "2 pictures", "warm-up"]
    assert all(None not in row and None not in row.values() for row in rows)
    assert float(rows[0]["ttft_s.max"]) == pytest.approx(0.2)
    assert rows[0]["slo_class_wide.met"] == ""


@pytest.mark.parametrize("label", ["emulated a100", "simulated"])
def test_what_is_not_real_says_so_wherever_figures_are(tmp_path: Path, label: str) -> None:
    folder = write_results(tmp_path, OUTCOMES, replace(CONDITIONS, label=label))
    done = CliRunner().invoke(main, ["report", str(folder)])
    assert label in done.output
    assert json.loads((folder / "report.json").read_text())["label"] == label
    assert (folder / "report.html").read_text().count(label) >= 3  # title, banner, origin
    lines = (folder / "report.csv").read_text().splitlines()[1:]
    assert all(line.startswith(f"{label},") for line in lines)


@pytest.mark.parametrize("outcomes", [[], [failed(0.0, "connection"), failed(1.0, "http_500")], [failed(0.0, "cancelled")]])
def test_runs_without_an_answer_have_a_report(tmp_path: Path, outcomes: list[object]) -> None:
    done = CliRunner().invoke(main, ["report", str(write_results(tmp_path, outcomes)), "--json"])  # type: ignore[arg-type]
    assert done.exit_code == 0, done.output
    assert "! No request" in done.output
    assert "TTFT" not in done.output.splitlines()[0]
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_that_was_cut_off_is_left_out_and_told(tmp_path: Path, cut: int) -> None:
    file = write_results(tmp_path, OUTCOMES) / "outcomes.jsonl"
    file.write_bytes(file.read_bytes()[: -1 - cut])
    report = make_report(tmp_path)
    assert report.classes[0].num_requests == len(OUTCOMES) - 1
    assert "The last line of outcomes.jsonl is cut off and was left out." in report.warnings


def test_other_lines_that_are_no_outcomes_are_counted(tmp_path: Path) -> None:
    file = write_results(tmp_path, OUTCOMES) / "outcomes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"{}\n", b"\xff\x00\n", b"\n", *lines[1:]]))
    report = make_report(tmp_path)
    assert report.classes[0].num_requests == len(OUTCOMES)
    assert "3 lines of outcomes.jsonl are no outcomes, the first is line 2." in report.warnings


def test_what_is_no_results_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "conditions.json").write_text('{"target": 1}')
    for folder in (tmp_path, tmp_path / "nowhere"):
        refused = CliRunner().invoke(main, ["report", str(folder)])
        assert refused.exit_code == 2
        assert len(refused.output.splitlines()) == 1
        assert "is no results folder of `loadgen replay`" in refused.output


def test_a_report_of_another_version_is_refused_and_a_folder_made_anew(tmp_path: Path) -> None:
    report = make_report(write_results(tmp_path, OUTCOMES))
    write_report(report, tmp_path)
    file = tmp_path / "report.json"
    written = read_report(file)
    assert read_report(tmp_path) == written
    assert msgspec.json.encode(written) == msgspec.json.encode(report)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(report, version=VERSION + 1)))
    assert read_report(tmp_path) == report
    with pytest.raises(ReportFailed, match="it is of version 2, not 1"):
        read_report(file)
    file.write_text("[1, 2")
    with pytest.raises(ReportFailed, match="is no report"):
        read_report(file)
