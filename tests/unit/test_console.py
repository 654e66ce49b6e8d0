"""Consoles whose reader goes away."""

from __future__ import annotations

import os
import sys

import pytest

from triptych.shared.console import progress_console


def test_what_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by others that write to the same file."""
    reader, writer = os.pipe()
    with open(writer, "w") as file, open(reader) as lines:
        monkeypatch.setattr(sys, "stderr", file)
        console = progress_console()
        console.print("heard")
        assert lines.readline() == "heard\n"
        lines.close()
        for _ in range(2):
            console.print("not heard")
        print("nor this", file=file, flush=True)
