"""Memory of processes as the kernel counts it: PSS, in which pages shared by n processes count 1/n for each."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def pss_bytes(pid: int) -> int:
    """PSS of a process; its resident size where the kernel tells no PSS; 0 when it is gone. Takes milliseconds for a
    process of gigabytes: not for every heartbeat."""
    for file, field, unit in (("smaps_rollup", "Pss:", 1024), ("status", "VmRSS:", 1024)):
        try:
            text = Path(f"/proc/{pid}/{file}").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * unit
    return 0


def family_pss_bytes() -> int:
    """PSS of this process and of those that it started. As slow as `pss_bytes`."""
    pids = [os.getpid()]
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids += map(int, file.read_text().split())
    return sum(map(pss_bytes, pids))
