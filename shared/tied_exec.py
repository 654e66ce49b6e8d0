"""Becomes another program that ends when our parent does: `python -I -S tied_exec.py PARENT_PID PROGRAM ARG...`.

The kernel sends SIGTERM when the parent dies, however it dies; that survives exec. Imports next to nothing: it runs once
for every child process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tied(*command: str) -> tuple[str, ...]:
    """What to run instead of `command` (its program as a path), so that it ends with this process. To be started by the main
    thread: the kernel takes the end of the thread that started it for the parent's. Only on Linux; elsewhere as `command`."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # the parent died before the kernel knew
    os.execv(sys.argv[2], sys.argv[2:])
