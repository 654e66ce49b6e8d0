"""What all benchmarks share: sides in turn, medians, bars, the table, the last line, the exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from triptych.loadgen.bench.commands import finish
from triptych.loadgen.bench.report import Bar, Report
from triptych.loadgen.bench.runner import BenchFailed, Plan, Side, alternate, tell
from triptych.loadgen.cli import main


def side(name: str, values: Iterable[float], order: list[str]) -> Side:
    given = iter(values)

    async def measure() -> dict[str, float]:
        order.append(name)
        value = next(given)
        return {"speed": value, "half": value / 2}

    return measure


async def test_sides_take_turns_and_medians_count() -> None:
    order: list[str] = []
    sides = {"ours": side("ours", [1, 9, 100], order), "theirs": side("theirs", [5, 3, 4], order)}
    medians = await alternate(sides, 3)
    assert medians == {"ours": {"speed": 9, "half": 4.5}, "theirs": {"speed": 4, "half": 2}}
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


async def test_warm_ups_do_not_count() -> None:
    order: list[str] = []
    medians = await alternate({"ours": side("ours", [1000, 1000, 1], order)}, 1, num_warmups=2)
    assert medians["ours"]["speed"] == 1
    assert len(order) == 3


def test_a_quick_plan_runs_once() -> None:
    assert (Plan(5).runs, Plan(5, is_quick=True).runs) == (5, 1)


@pytest.mark.parametrize(
    ("bar", "holds"),
    [
        (Bar(1.0, 1.0), True),
        (Bar(0.99, 1.0), False),
        (Bar(1.0, 1.0, is_most=True), True),
        (Bar(1.01, 1.0, is_most=True), False),
    ],
)
def test_bars(bar: Bar, holds: bool) -> None:
    assert bar.holds is holds
    assert Report("b", {}, {}, {"x": Bar(2, 1), "y": bar}).holds is holds


def report(*bars: Bar) -> Report:
    figures = {"speed.ours": 12345.678, "speed.theirs": 0.012345, "alone": 7}
    return Report("toy", {"cores": 2, "best": {"a": 1}}, figures, {f"bar{i}": bar for i, bar in enumerate(bars)})


@pytest.mark.parametrize(("bars", "status"), [((), 0), ((Bar(2, 1),), 0), ((Bar(2, 1), Bar(0.5, 1)), 1)])
def test_the_exit_status_and_the_last_line(capsys: pytest.CaptureFixture[str], bars: tuple[Bar, ...], status: int) -> None:
    async def measuring() -> Report:
        return report(*bars)

    with pytest.raises(typer.Exit) as ended:
        finish(measuring(), as_json=True)
    assert ended.value.exit_code == status
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {
        "bench": "toy",
        "conditions": {"cores": 2, "best": {"a": 1}},
        "figures": {"speed.ours": 12350.0, "speed.theirs": 0.01235, "alone": 7},
        "bars": {f"bar{i}": {"value": bar.value, "limit": bar.limit, "holds": bar.holds} for i, bar in enumerate(bars)},
    }


def test_what_could_not_be_measured_is_another_status(capsys: pytest.CaptureFixture[str]) -> None:
    async def measuring() -> Report:
        raise BenchFailed("no such interpreter")

    with pytest.raises(typer.Exit) as ended:
        finish(measuring(), as_json=True)
    assert ended.value.exit_code == 2
    assert capsys.readouterr() == ("", "no such interpreter\n")


def test_progress_is_in_logs_too(capsys: pytest.CaptureFixture[str]) -> None:
    tell("loading [some] model ...")
    assert capsys.readouterr() == ("", "loading [some] model ...\n")


def test_the_table_has_a_row_per_figure_and_a_column_per_side() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    report(Bar(0.5, 1)).print(console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["figure", "ours", "theirs"]
    assert lines[1] == ["speed", "12,346", "0.0123"]
    assert lines[2:4] == [["figure", "value"], ["alone", "7"]]
    assert lines[5] == ["bar0", "0.5", "at", "least", "1", "does", "not", "hold"]
    assert lines[6] == ["cores", "2"]


def test_an_unknown_model_is_told_in_one_line() -> None:
    ran = CliRunner().invoke(main, ["bench", "engine", "--model", "no-such-model", "--quick"])
    assert ran.exit_code == 2
    assert "'no-such-model' is no checkpoint's folder" in ran.stderr
