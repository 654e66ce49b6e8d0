"""A child's output: what is shown, what is kept, and that neither grows without a bound."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from triptych.services.launcher import child_log
from triptych.services.launcher.child_log import MAX_LINE_BYTES, NUM_LAST_LINES, ChildLog, parse_entry


class Shown(list[str]):
    """What the user sees."""


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def log(tmp_path: Path, shown: Shown) -> ChildLog:
    return ChildLog("decode-0", tmp_path / "decode-0.log", logging.WARNING, shown.append)


def entry(level: str, event: str, **fields: object) -> bytes:
    return json.dumps({"level": level, "event": event, "timestamp": "t", "process": "p", **fields}).encode() + b"\n"


def test_warnings_are_shown_and_everything_is_kept(log: ChildLog, shown: Shown, tmp_path: Path) -> None:
    output = (
        entry("info", "ready") + b"plain text\n" + entry("warning", "slow", lag_s=2) + entry("error", "x", exception="T\nV")
    )
    for start in range(0, len(output), 7):  # pieces as a pipe may cut them
        log.feed(output[start : start + 7])
    log.end()
    assert shown == ["decode-0 | warning: slow lag_s=2", "decode-0 | error: x\nT\nV"]
    assert list(log.last_lines) == ["info: ready", "plain text", "warning: slow lag_s=2", "error: x\nT\nV"]
    assert (tmp_path / "decode-0.log").read_bytes() == output


def test_an_unfinished_line_counts_at_the_end(log: ChildLog) -> None:
    log.feed(b"Fatal Python error")
    assert not log.last_lines
    log.end()
    assert list(log.last_lines) == ["Fatal Python error"]


def test_a_second_process_of_the_slot_goes_on_in_the_same_file(log: ChildLog, tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        log.feed(line)
        log.end()
    assert (tmp_path / "decode-0.log").read_bytes() == b"one\ntwo\n"


def test_memory_and_files_are_bounded(log: ChildLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_log, "MAX_FILE_BYTES", 10_000)
    for _ in range(100):
        log.feed(b"x" * 1000)
    for index in range(2 * NUM_LAST_LINES):
        log.feed(f"line {index}\n".encode())
    log.end()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 11_000 + 1000
    assert len(log.last_lines) == NUM_LAST_LINES
    assert log.last_lines[-1] == f"line {2 * NUM_LAST_LINES - 1}"


def test_an_endless_line_is_cut(log: ChildLog) -> None:
    log.feed(b"y" * (MAX_LINE_BYTES + 1))
    assert [len(line) for line in log.last_lines] == [MAX_LINE_BYTES + 1]
    log.end()


@pytest.mark.parametrize("text", ["", "{", "{}", '{"level": "info"}', "[1]", '{"event": 1}', "{'level': 1}"])
def test_what_is_no_log_line(text: str) -> None:
    assert parse_entry(text) is None
