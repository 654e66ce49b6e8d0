"""`loadgen compare A B`: ratios are B over A, and what differs in the conditions is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.replay_results import CONDITIONS, answered, failed, write_results
from triptych.loadgen.cli import main
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.compare import Comparison, compare, print_comparison
from triptych.loadgen.report.results import make_report

OUTCOMES = [answered(float(at_s), 0.2, [0.04], num_images=at_s % 2) for at_s in range(20)]
FASTER = [answered(float(at_s), 0.1, [0.01], num_images=at_s % 2) for at_s in range(20)]


def comparison_of(
    folder: Path, b: Sequence[RequestOutcome], conditions: Conditions = CONDITIONS, a: Sequence[RequestOutcome] = OUTCOMES
) -> Comparison:
    folders = write_results(folder / "a", a), write_results(folder / "b", b, conditions)
    return compare(*map(make_report, folders))


def printed(comparison: Comparison, width: int = 200) -> str:
    console = Console(width=width, record=True, force_terminal=True)
    with console.capture() as capture:
        print_comparison(comparison, console)
    return capture.get()


def test_ratios_are_b_over_a_for_each_class(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, FASTER)
    assert list(comparison.ratios) == ["all", "text", "image", "1 picture"]
    for by_figure in comparison.ratios.values():
        assert by_figure["ttft_s.p99"].ratio == pytest.approx(0.5, rel=0.006)
        assert by_figure["tbt_over_tokens_s.mean"].ratio == pytest.approx(0.25)
        assert by_figure["num_failed"].ratio is None
        assert "slo_class_wide.met" not in by_figure
    assert comparison.differences == []
    assert "same conditions" in printed(comparison)


def test_better_and_worse_have_colours_and_narrow_terminals_fewer_classes(tmp_path: Path) -> None:
    green, red = "\x1b[32m", "\x1b[31m"
    assert green in printed(comparison_of(tmp_path / "better", FASTER))
    assert red in printed(comparison_of(tmp_path / "worse", OUTCOMES, a=FASTER))
    same = printed(comparison_of(tmp_path / "same", OUTCOMES))
    assert not {green, red} & {same[at : at + 5] for at in range(len(same))}
    narrow = printed(comparison_of(tmp_path / "narrow", FASTER), width=80)
    assert "B/A text" in narrow
    assert "B/A 1 picture" not in narrow


def test_conditions_that_differ_are_named_and_how_runs_went_is_none(tmp_path: Path) -> None:
    other = replace(
        CONDITIONS,
        seed=8,
        options={**CONDITIONS.options, "speed_up": 3.0, "new": True, "seed": 8, "out": "b"},
        started_at="2027",
    )
    comparison = comparison_of(tmp_path, FASTER, other)
    assert {difference.name: (difference.a, difference.b) for difference in comparison.differences} == {
        "seed": ("7", "8"),
        "options.speed_up": ("2", "3"),
        "options.new": (None, "True"),
    }
    assert "seed: 7 in A, 8 in B" in printed(comparison)


def test_what_only_one_side_warns_of_is_told(tmp_path: Path) -> None:
    """A run that broke off is none to compare a whole one with."""
    broken = replace(CONDITIONS, ended="target_died", message="The target died.", notes=("New.",))
    comparison = compare(
        make_report(write_results(tmp_path / "a", OUTCOMES, replace(CONDITIONS, notes=("Old.",)))),
        make_report(write_results(tmp_path / "b", FASTER, broken)),
    )
    shown = printed(comparison)
    assert "Old." in comparison.warnings_a
    assert "! B: The target died." in shown
    assert "! A: The target died." not in shown
    assert comparison_of(tmp_path / "same", OUTCOMES).warnings_b == []


def test_what_is_not_real_says_so(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, FASTER, replace(CONDITIONS, label="emulated a100"))
    assert (comparison.label_a, comparison.label_b) == ("real", "emulated a100")
    assert "B, emulated a100" in printed(comparison)


@pytest.mark.parametrize("b", [[], [failed(0.0, "timeout")], [answered(0.0, 0.0)]])
def test_runs_without_answers_compare(tmp_path: Path, b: list[RequestOutcome]) -> None:
    for comparison in (comparison_of(tmp_path / "1", b), comparison_of(tmp_path / "2", FASTER, a=b)):
        assert "requests" in printed(comparison)


def test_the_command(tmp_path: Path) -> None:
    folders = [str(write_results(tmp_path / name, outcomes)) for name, outcomes in (("a", OUTCOMES), ("b", FASTER))]
    done = CliRunner().invoke(main, ["compare", *folders, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["ratios"]["all"]["e2e_s.max"]["ratio"] == pytest.approx(0.11 / 0.24)
    refused = CliRunner().invoke(main, ["compare", folders[0], str(tmp_path / "nowhere")])
    assert refused.exit_code == 2
    assert "nowhere" in refused.output
