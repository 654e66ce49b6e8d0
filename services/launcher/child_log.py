"""What a child process prints: kept in a bounded file, its last lines in memory, warnings and worse shown to the user."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MAX_FILE_BYTES = 32 << 20  # chosen: then the file is moved to NAME.1, so a log takes at most twice that
MAX_LINE_BYTES = 1 << 16  # chosen: longer lines are cut in two
NUM_LAST_LINES = 40  # chosen: a traceback with its cause


class ChildLog:
    """Fed with raw output. show: called with a line for the user, when its level is at least threshold (a logging level).
    Output that isn't one of our JSON log lines has no level and is only kept."""

    def __init__(self, name: str, path: Path, threshold: int, show: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._name = name
        self._path = path
        self._threshold = threshold
        self._show = show
        self._rest = b""
        self._file: BinaryIO | None = None  # open while a process writes

    def feed(self, chunk: bytes) -> None:
        """Append output; complete lines are looked at."""
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(chunk)
        self._file.flush()
        if self._file.tell() > MAX_FILE_BYTES:
            self._close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._on_line(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._on_line(self._rest)
            self._rest = b""

    def end(self) -> None:
        """The output has ended."""
        if self._rest:
            self._on_line(self._rest)
            self._rest = b""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _on_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        entry = parse_entry(text)
        if entry is None:
            self.last_lines.append(text)
            return
        level, shown = entry
        self.last_lines.append(shown)
        if level >= self._threshold:
            self._show(f"{self._name} | {shown}")


def parse_entry(text: str) -> tuple[int, str] | None:
    """Level and readable form of one of our JSON log lines; None when it isn't one."""
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
        level_name = str(fields.pop("level"))
        event = str(fields.pop("event"))
    except (ValueError, KeyError, AttributeError):
        return None
    level = logging.getLevelNamesMapping().get(level_name.upper(), logging.INFO)
    for hidden in ("timestamp", "process"):
        fields.pop(hidden, None)
    exception = fields.pop("exception", "")
    detail = "".join(f" {key}={value}" for key, value in fields.items())
    return level, f"{level_name}: {event}{detail}" + (f"\n{exception}" if exception else "")
