"""How `triptych status` and `triptych drain` find the cluster that runs on this machine: one small file per `triptych up`.

In a folder of the user's own. `up` holds a lock on its file: one that nobody holds is left from a killed run and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec


class RunFile(msgspec.Struct, frozen=True):
    """started_s: wall-clock time, to tell which cluster is the newest."""

    pid: int
    started_s: float
    url: str
    nats_url: str


@dataclass(slots=True)
class RunAnnouncement:
    """Holds the file's lock: as long as this process lives, the file counts."""

    path: Path
    file: BinaryIO

    def withdraw(self) -> None:
        """Idempotent. The folder goes with its last file."""
        _remove(self.path)
        self.file.close()


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"triptych-{os.getuid()}"


def announce_run(url: str, nats_url: str) -> RunAnnouncement:
    """Tell where this process's cluster is, until it ends."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid()}.json"
    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b")  # noqa: SIM115 - the lock lives as long
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(msgspec.json.encode(RunFile(os.getpid(), time.time(), url, nats_url)))
    file.flush()
    return RunAnnouncement(path, file)


def list_running() -> list[RunFile]:
    """The clusters that run, the one that was started last first."""
    folder = _folder()
    if not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return []  # somebody else's folder in a shared temp folder
    found = [run for path in folder.glob("*.json") if (run := _read_if_alive(path)) is not None]
    return sorted(found, key=lambda run: run.started_s, reverse=True)


def _read_if_alive(path: Path) -> RunFile | None:
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its writer lives
                return msgspec.json.decode(file.read(), type=RunFile)
        _remove(path)
    except (OSError, msgspec.MsgspecError):  # removed meanwhile, or just being written
        return None
    return None


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
