"""What `triptych up` says of a process that ended before it was ready."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from triptych.services.launcher.child import ChildSpec
from triptych.services.launcher.child_log import ChildLog
from triptych.services.launcher.local import Slot
from triptych.services.launcher.up import _why


def slot(folder: Path, output: str) -> Slot:
    log = ChildLog("encoder-0", folder / "log", logging.ERROR, lambda line: None)
    log.feed(output.encode())
    log.end()
    return Slot("encoder-0", lambda _: ChildSpec("encoder-0", (), {}), log)


def test_its_own_reason_is_one_line(tmp_path: Path) -> None:
    reason = {"level": "error", "event": "could not start: torch sees no CUDA device", "code": "bad_setting"}
    output = f"a warning of some library\n{json.dumps(reason)}\n"
    expected = "encoder-0 could not start: torch sees no CUDA device code=bad_setting"
    assert _why(slot(tmp_path, output), "status 1") == expected


def test_without_one_its_last_lines_are_shown(tmp_path: Path) -> None:
    assert _why(slot(tmp_path, "Traceback\nboom\n"), "signal 9").endswith(
        "signal 9 before it was ready; its last lines:\n  Traceback\n  boom"
    )
    assert _why(slot(tmp_path, ""), "status 1").endswith("(it printed nothing)")
