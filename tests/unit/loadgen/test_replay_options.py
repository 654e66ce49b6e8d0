"""`loadgen replay` with values that make no sense: one message, before anything is asked of anybody or written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.replay_results import CONDITIONS, write_results
from triptych.loadgen.cli import main
from triptych.loadgen.replay import commands
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.report import results
from triptych.loadgen.traces.own import own_line
from triptych.loadgen.traces.row import TraceRow

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    path = tmp_path / "trace.jsonl"
    path.write_text(own_line(TraceRow(0.0, 20, 2)) + "\n")
    return path


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--speed-up 0", "--speed-up"),
        ("--speed-up inf", "--speed-up"),
        ("--speed-up nan", "--speed-up"),
        ("--text-rate 1001", "--text-rate"),
        ("--image-rate -1", "--image-rate"),
        ("--start inf", "--start"),
        ("--duration 0", "--duration"),
        ("--duration inf", "--duration"),
        ("--limit 0", "--limit"),
        ("--limit 99999999999999999999", "--limit"),
        ("--warm-up inf", "--warm-up"),
        ("--warm-up nan", "--warm-up"),
        ("--timeout 0", "--timeout"),
        ("--timeout inf", "--timeout"),
        ("--cancel-rate 1.1", "--cancel-rate"),
        ("--cancel-rate nan", "--cancel-rate"),
        ("--concurrency 0", "--concurrency"),
        ("--seed -1", "--seed"),
        ("--max-images -1", "--max-images"),
        ("--image-count cube", "--image-count"),
        ("--image-size 1x1", "no picture size"),
        ("--image-reuse zipf", "no popularity"),
        ("--content jokes", "--content"),
        ("--isolated 0", "--isolated"),
        ("--isolated-from nowhere", "nowhere"),
        ("--slo ttft=1s,ttft=2s", "bounded twice"),
        ("--header x", "Name: value"),
        ("--target ftp://x", "no server's URL"),
        ("--target http://me:hush@x", "--header"),
        ("--out trace.jsonl", "File exists"),
        ("--out /proc/nowhere/x", "/proc/nowhere"),
    ],
)
def test_refused(options: str, told: str, trace: Path) -> None:
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE, *options.split()])
    assert done.exit_code == 2, done.output
    assert told in re.sub(r"[\s│]+", " ", done.output)
    assert "hush" not in done.output
    assert [path.name for path in Path().iterdir()] == [trace.name]


def test_a_key_that_no_header_can_have(trace: Path) -> None:
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE], env={"OPENAI_API_KEY": "hush\nhush"})
    assert done.exit_code == 2
    assert "OPENAI_API_KEY" in done.output
    assert "hush" not in done.output


def test_a_folder_that_nothing_can_be_written_to(trace: Path) -> None:
    (trace.parent / "out" / "conditions.json.new").mkdir(parents=True)
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE, "--out", "out"])
    assert done.exit_code == 2
    assert done.output.startswith("The results cannot be written: ")
    assert "Traceback" not in done.output


def test_a_report_that_cannot_be_written_is_shown(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "PAGE_FILE", "nowhere/report.html")
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE, "--out", "out"])
    assert done.exit_code == 2
    assert "No server answers" in done.output
    assert "the report cannot be written: " in done.output
    assert "Traceback" not in done.output


def test_no_report_of_an_earlier_run_is_left(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should this run be killed, its folder must not look as if it had come to that one's figures."""
    Path("out").mkdir()
    Path("out/report.json").write_text("{}")

    def look() -> None:
        assert list(Path("out").iterdir()) == []
        write_results(Path("out"), [])

    async def replay(*_: object) -> Conditions:
        look()
        return CONDITIONS

    monkeypatch.setattr(commands, "replay", replay)
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE, "--out", "out"])
    assert done.exit_code == 0, done.output
    assert Path("out/report.json").stat().st_size > 100


def test_ctrl_c_while_the_report_is_made(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def replay(*_: object) -> Conditions:
        write_results(trace.parent / "out", [])
        return CONDITIONS

    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "replay", replay)
    monkeypatch.setattr(commands, "publish", interrupt)
    done = CliRunner().invoke(main, ["replay", str(trace), "--target", NOWHERE, "--out", "out"])
    assert done.exit_code == 130
    assert "No report was made; `loadgen report out` makes one." in done.output
