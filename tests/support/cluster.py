"""A cluster as its user starts it: `triptych up --json` in a child process, with all its files in one folder.

Everything that this module starts is ended by pid. Failures show the end of the cluster's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from triptych.shared.tied_exec import tied

T = TypeVar("T")

START_TIMEOUT_S = 90.0  # chosen: a loaded 2-core machine; the bound that the product promises is tested in test_up.py
STOP_TIMEOUT_S = 45.0
MAX_BODY_BYTES = 4 << 20  # of the shared cluster: small, so that a test can go over it quickly
STARTER = (  # a program that runs a cluster, may be killed, and leaves Ctrl-C to it
    sys.executable,
    "-c",
    "import signal, subprocess, sys; signal.signal(signal.SIGINT, lambda *_: 0); sys.exit(subprocess.call(sys.argv[1:]))",
)
FEW_INFLIGHT = 4  # requests that the colocated cluster takes at a time


class Cluster:
    """Started by the constructor, which returns when the JSON line came; `stop` is idempotent. starter: a command that runs
    the one in its arguments; process is its then."""

    def __init__(
        self,
        model_dir: Path,
        folder: Path,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        starter: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir(parents=True)
        command = [str(Path(sys.executable).with_name("triptych")), "up", "--json", "--port", "0", "--model", str(model_dir)]
        command += ["--log-dir", str(folder / "logs")]
        # short names: a unix socket or a path under TMPDIR has a bound
        environment = {**os.environ, "TMPDIR": str(self.temp_dir), "HF_HUB_OFFLINE": "1", **(env or {})}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                tied(*starter, *command, *args),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # as a terminal would: one process group that a Ctrl-C reaches
            )
        self._seen: dict[int, psutil.Process] = {}
        try:
            self.info: dict[str, Any] = wait_for(self._read_info, START_TIMEOUT_S, "the JSON line of `triptych up`")
        except BaseException:
            self.stop()
            raise
        self.url: str = self.info["url"].rstrip("/")
        self.nats_url: str = self.info["nats_url"]

    def _read_info(self) -> dict[str, Any] | None:
        self.processes()
        if self.process.poll() is not None:
            raise AssertionError(f"`triptych up` ended with {self.process.returncode}:\n{self.log()}")
        for line in (self.folder / "out").read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                return dict(json.loads(line))
        return None

    def log(self, num_chars: int = 6000) -> str:
        return "\n".join(
            f"--- {name}:\n{(self.folder / name).read_text(errors='replace')[-num_chars:]}" for name in ("out", "err")
        )

    def processes(self) -> list[psutil.Process]:
        """`up` and everything under it, now. All that were ever seen are remembered, for `survivors`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            up = psutil.Process(self.process.pid)
            for process in [up, *up.children(recursive=True)]:
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if _is_alive(process)]

    def pids_of(self, executable: str) -> list[int]:
        """Children whose executable's name starts so (`nats-server`, `valkey-server`)."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(executable[:15]):  # the kernel keeps 15 characters
                    found.append(process.pid)
        return found

    def pid_of(self, executable: str) -> int:
        found = self.pids_of(executable)
        assert len(found) == 1, f"{len(found)} processes are called {executable}"
        return found[0]

    def status(self) -> dict[str, Any]:
        """`triptych status --json`, as a user would ask."""
        command = [str(Path(sys.executable).with_name("triptych")), "status", "--json"]
        done = subprocess.run(
            command,
            env={**os.environ, "TRIPTYCH_NATS_URL": self.nats_url},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, signal_number: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does; kill what does not listen. The exit status of `up`."""
        self.processes()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal_number)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"`triptych up` still runs {STOP_TIMEOUT_S} s after its signal:\n{self.log()}") from error
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(10)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_for(probe: Callable[[], T | None], timeout_s: float, what: str, interval_s: float = 0.05) -> T:
    """The first result of `probe` that is true; AssertionError naming `what` after timeout_s."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if result := probe():
            return result
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(interval_s)
