"""A cluster of our own for the demo and the benchmarks: `triptych up` as a child process, its JSON line, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from triptych.loadgen.child_process import wait_or_kill
from triptych.shared.tied_exec import tied

START_TIMEOUT_S = 240.0  # chosen: three processes that load torch, on a slow disk; an emulated start of 94 s
STOP_TIMEOUT_S = 45.0  # chosen: longer than drain_timeout_s
LOG_TAIL_CHARS = 3000


class ClusterFailed(Exception):
    """The cluster didn't start. The text is for the user."""


@contextlib.asynccontextmanager
async def running_cluster(
    model: Path | str, folder: Path, console: Console, options: Sequence[str] = ()
) -> AsyncIterator[dict[str, Any]]:
    """`triptych up` with these options besides; gives its JSON line, and stops it at the end. `folder`, which exists, is for
    its logs.

    Raises:
        ClusterFailed: it ended before it was ready.
    """
    log_path = folder / "cluster.log"
    arguments = ("--json", "--port", "0", "--model", str(model), "--log-dir", str(folder / "logs"), *options)
    command = tied(sys.executable, "-m", "triptych.services.cli", "up", *arguments)
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C reaches us, and we stop the cluster once.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        assert process.stdout is not None
        with console.status("Starting the cluster ..."):
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            await process.wait()
            tail = log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
            raise ClusterFailed(f"the cluster ended with status {process.returncode}; {log_path} says:\n{tail}")
        yield json.loads(line)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    await wait_or_kill(process, STOP_TIMEOUT_S)
