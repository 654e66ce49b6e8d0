"""Becomes another program that ends when our parent does: `python -I -S tied_exec.py PARENT_PID PROGRAM ARG...`.

The kernel sends SIGTERM when the parent dies, however it dies; that survives exec. Imports next to nothing: it runs once
for every child process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # the parent died before the kernel knew
    os.execv(sys.argv[2], sys.argv[2:])
