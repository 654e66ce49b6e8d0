"""`loadgen synth` as people use it, and how far what it makes is from what was published."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from triptych.loadgen.cli import main
from triptych.loadgen.synth import commands
from triptych.loadgen.synth.fit import Made
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.scaling import Wishes, as_wished
from triptych.loadgen.synth.workload import Workload, load_workload
from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.row import TraceRow

QUIET = """
about = "a burst of nothing, all the time"
duration_s = 10
[[client]]
name = "c"
rate_per_s = 5
output_tokens = { 50 = 3 }
text_tokens = { 50 = 3 }
burst = [{ start_s = 0, duration_s = 10, rate = 0 }]
"""


def synth(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["synth", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_makes_a_trace_of_azures_form(tmp_path: Path) -> None:
    path = tmp_path / "made" / "trace.csv"
    told = synth("--duration", 1200, "--rate", 2, "--image-share", 0.25, "--seed", 3, "--out", path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens"]
    assert rows[0]["TIMESTAMP"].startswith("2024-10-15T12:00:")
    assert all(row["TIMESTAMP"].endswith("Z") for row in rows)
    assert {int(row["NumImages"]) ** 0.5 % 1 for row in rows} == {0}, "squares, as published"
    assert "error against azure-lmm" in told
    assert f"{len(rows):,} requests in 1,200 s" in told
    assert told.rstrip().endswith("trace.csv")
    trace = open_trace(path)
    assert trace.form == "azure-lmm"
    assert len(list(trace)) == len(rows)


def test_the_same_seed_the_same_file(tmp_path: Path) -> None:
    for name in ("a.csv.gz", "b.csv.gz"):
        synth("--duration", 300, "--seed", 7, "--out", tmp_path / name)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


def test_conversations_need_our_form(tmp_path: Path) -> None:
    assert "name the file .jsonl" in synth("chat-reuse", "--duration", 60, "--out", tmp_path / "chat.csv")
    assert "name the file .jsonl" not in synth("chat-reuse", "--duration", 60, "--out", tmp_path / "chat.jsonl")
    expected = list(workload_rows(as_wished(load_workload("chat-reuse"), Wishes(duration_s=60))))
    read = list(open_trace(tmp_path / "chat.jsonl"))
    assert [(row.session, row.turn, row.prefix_ids) for row in read] == [
        (row.session, row.turn, row.prefix_ids) for row in expected
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["burst"], "no such file, and no workload: those are azure-lmm, bursts"),
        (["--out", "trace.parquet"], "the name of a trace ends in .csv or .jsonl"),
        (["bursts", "--rate", "0.000001", "--duration", "1"], "no request in 1 s at this rate"),
        (["servegen", "--image-share", "0.5"], "needs clients of both kinds"),
        (["quiet.toml"], "the workload's clients send nothing in its duration"),
        (["--out", "/dev/null/trace.csv"], "/dev/null: File exists"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quiet.toml").write_text(QUIET)
    result = CliRunner().invoke(main, ["synth", *arguments])
    assert result.exit_code == 2
    assert told in result.output
    assert result.output.count("\n") == 1


def test_a_trace_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever presses Ctrl-C, or asks for nothing, keeps the file that was there."""

    def rows(_: Workload) -> Iterator[TraceRow]:
        yield TraceRow(0.0, 1, 1)
        raise KeyboardInterrupt

    path = tmp_path / "trace.csv"
    synth("bursts", "--duration", 20, "--out", path)
    before = path.read_bytes()
    refused = CliRunner().invoke(main, ["synth", "bursts", "--rate", "0.000001", "--duration", "1", "--out", str(path)])
    assert refused.exit_code == 2
    monkeypatch.setattr(commands, "workload_rows", rows)
    assert CliRunner().invoke(main, ["synth", "bursts", "--out", str(path)]).exit_code == 130
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_percentiles_are_the_published_ones() -> None:
    """A steady trace: 10,000 requests of each class. p99 of contexts stands on 100 requests there."""
    made = Made()
    for _ in made.counted(workload_rows(as_wished(load_workload("azure-lmm"), Wishes(20_000, 1.0, 0.5, 11, is_steady=True)))):
        pass
    errors = made.errors("azure-lmm")
    assert len(errors) == 25
    for (request_class, what, percent), error in errors.items():
        assert abs(error) < (0.2 if percent == 99 else 0.12), (request_class, what, percent)
    assert fmean(abs(error) for error in errors.values()) < 0.04


def test_minutes_swing_as_published() -> None:
    """Largest and smallest of 8 minutes over the mean: 1.35 and 0.73 for text, 2.5 and 0.27 for pictures in the plots."""
    day = as_wished(load_workload("azure-lmm"), Wishes(duration_s=28_800, seed=2))
    minutes = {"text": [0] * 480, "image": [0] * 480}
    for row in workload_rows(day):
        minutes[row.request_class][int(row.arrival_s // 60)] += 1
    for name, largest, smallest in (("text", 1.35, 0.73), ("image", 2.3, 0.27)):
        spans = [minutes[name][begin : begin + 8] for begin in range(0, 480, 8)]
        assert fmean(max(span) / fmean(span) for span in spans) == pytest.approx(largest, abs=0.25)
        assert fmean(min(span) / fmean(span) for span in spans) == pytest.approx(smallest, abs=0.15)
