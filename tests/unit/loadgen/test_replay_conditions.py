"""Conditions go to the results folder and come back; what the user gave is shown there, but for secrets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.loadgen.replay.conditions import Conditions, read_conditions, write_conditions
from triptych.loadgen.replay.options import parse_headers, shown_options
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, LatencyLine, Limits, parse_slos
from triptych.loadgen.undecodable import UNDECODABLE

CONDITIONS = Conditions(
    target="http://x",
    model="m",
    label="real",
    versions={"triptych": "1"},
    started_at="2026-01-01T00:00:00Z",
    trace="t.csv",
    trace_form="azure-lmm",
    seed=3,
    options={"speed_up": 1.5, "limit": None, "natural": True, "slo": ["ttft=1"], "content": "trace"},
    slos=parse_slos(["image:ttft=5x,tbt=100ms"]),
    isolated={"image": Isolated(3, 1.0, LatencyLine(0.5, 0.1))},
    notes=("One.",),
    error_examples={"http_503": "busy"},
)


def outcome(request_class: str) -> RequestOutcome:
    return RequestOutcome(0, request_class, 0, 0.0, 0.0, 1.0, num_prompt_tokens=10)


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    write_conditions(CONDITIONS, tmp_path)
    assert read_conditions(tmp_path) == CONDITIONS
    assert [path.name for path in tmp_path.iterdir()] == ["conditions.json"]


def test_a_file_that_is_none_is_a_value_error(tmp_path: Path) -> None:
    for text in ("", "{}", "[1]", "[" * 10_000):
        (tmp_path / "conditions.json").write_text(text)
        with pytest.raises(UNDECODABLE, match=r"\w"):
            read_conditions(tmp_path)


def test_limits_by_class() -> None:
    assert CONDITIONS.class_wide_limits(outcome("image")) == Limits(5.0, 0.1)
    assert CONDITIONS.own_scaled_limits(outcome("image")) == Limits(7.5, None)
    assert CONDITIONS.class_wide_limits(outcome("text")) is None
    assert CONDITIONS.own_scaled_limits(outcome("text")) is None


def test_names_of_files_that_no_json_can_hold(tmp_path: Path) -> None:
    given = {"out": Path("a\udcff"), "model": "m\udcff", "slo": ["\udcff"]}
    write_conditions(replace(CONDITIONS, options=shown_options(given)), tmp_path)
    assert read_conditions(tmp_path).options == {"out": "a\ufffd", "model": "m\ufffd", "slo": ["\ufffd"]}


def test_values_of_headers_are_not_shown() -> None:
    given = {"header": ["Authorization: Bearer hush"], "out": Path("a/b"), "slo": None, "seed": 3}
    assert shown_options(given) == {"header": ["Authorization"], "out": "a/b", "slo": None, "seed": 3}
    assert parse_headers(["X-Key:  a:b "]) == {"X-Key": "a:b"}
    assert parse_headers(["authorization: Bearer other"]) == {"Authorization": "Bearer other"}  # instead of the environment's


@pytest.mark.parametrize(
    "text", ["hush", ": hush", "X: hush\nY: z", "X Y: hush", "X: hu\x01sh", "\u00dc: hush", "X: hush\udcff"]
)
def test_headers_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="Name: value") as raised:
        parse_headers([text])
    assert "hush" not in str(raised.value)
