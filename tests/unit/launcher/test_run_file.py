"""How commands find the running cluster: the newest one that lives; leftovers are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.services.launcher.run_file import RunFile, announce_run, list_running


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def newest() -> RunFile | None:
    return next(iter(list_running()), None)


def test_none_runs() -> None:
    assert newest() is None


def test_a_running_one_is_found_until_it_is_withdrawn(runtime_dir: Path) -> None:
    announcement = announce_run("http://u", "nats://secret@n")
    assert announcement.path.stat().st_mode & 0o077 == 0, "the URL holds a password"
    assert announcement.path.parent.stat().st_mode & 0o077 == 0
    run = newest()
    assert run is not None
    assert (run.pid, run.url, run.nats_url) == (os.getpid(), "http://u", "nats://secret@n")
    announcement.withdraw()
    assert newest() is None
    assert not list(runtime_dir.iterdir())


def test_a_killed_one_is_removed(runtime_dir: Path) -> None:
    code = (
        "import os, signal\n"
        "from triptych.services.launcher.run_file import announce_run\n"
        "keep = announce_run('u', 'n')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert len(list(runtime_dir.rglob("*.json"))) == 1
    assert newest() is None
    assert not list(runtime_dir.iterdir())


def test_the_newest_of_two_is_found(runtime_dir: Path) -> None:
    code = (
        "import sys\n"
        "from triptych.services.launcher.run_file import announce_run\n"
        "keep = announce_run('newer', 'n')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    older = announce_run("older", "n")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as newer:
        assert newer.stdout is not None
        newer.stdout.readline()
        found = newest()
        assert [run.url for run in list_running()] == ["newer", "older"]
        newer.communicate(timeout=60)
    assert found is not None
    assert found.url == "newer"
    found = newest()
    assert found is not None
    assert found.url == "older"
    older.withdraw()


def test_garbage_is_ignored(runtime_dir: Path) -> None:
    older = announce_run("u", "n")
    (older.path.parent / "1.json").write_text("garbage")
    found = newest()
    assert found is not None
    assert found.url == "u"
    older.withdraw()
