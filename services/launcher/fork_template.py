"""A process that has imported what the torch stages need, and forks: `python -m ... fork_template SOCKET_FD LAUNCHER_PID`.

Importing torch and transformers costs 5 s of CPU a process; a fork of this one has them at once and shares their memory.
Forks become children of the launcher (a subreaper), so this process may die without harm. It stays single-threaded, and
runs no event loop and no model: what it forks starts as a fresh interpreter would, but for the imports.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
from typing import NoReturn

import msgspec

PRELOADED = (
    "triptych.services.engine_host",
    "triptych.services.instance",
    "triptych.services.preprocess.app",
    "triptych.shared.transport.transport",
)
MAX_REQUEST_BYTES = 1 << 17  # chosen: an environment of ordinary size; a larger one is refused by the sender
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15
STDOUT, STDERR = 1, 2


class ForkRequest(msgspec.Struct, frozen=True):
    """Run `arguments` of the `triptych` command as process `name`, in environment env. Its output goes to the descriptor that
    comes along."""

    name: str
    arguments: tuple[str, ...]
    env: dict[str, str]


def serve_forks(control: socket.socket, launcher_pid: int) -> ForkRequest | None:
    """Fork for each request and answer with the pid. Returns None when the launcher has gone; in a fork, what to run."""
    decoder = msgspec.json.Decoder(ForkRequest)
    while True:
        payload, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 1)
        if not payload:
            return None
        request, output = decoder.decode(payload), descriptors[0]
        pid = _fork_to_launcher()
        if pid == 0:
            control.close()
            _become(request, output, launcher_pid)
            return request
        os.close(output)
        try:
            control.send(str(pid).encode())
        except BrokenPipeError:  # the launcher had no more patience, and starts it otherwise: there may not be two
            os.kill(pid, signal.SIGKILL)
            return None


def _fork_to_launcher() -> int:
    """Fork twice, so that the launcher inherits the grandchild. Its pid here, 0 there (once it has been inherited)."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        middle = os.getpid()
        pid = os.fork()
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        while os.getppid() == middle:
            time.sleep(0.001)  # there is no call that waits for one's parent to end
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    os.waitpid(middle, 0)
    with os.fdopen(reader, "rb") as answered:
        return int(answered.read())


def _become(request: ForkRequest, output: int, launcher_pid: int) -> None:
    """Turn this fork into the requested process: session, output, environment, and the launcher's death as ours."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher_pid:
        sys.exit(1)  # the launcher died before the kernel knew
    libc.prctl(PR_SET_NAME, request.name.encode())
    os.setsid()
    os.dup2(output, STDOUT)
    os.dup2(output, STDERR)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # it is read from the environment once
    sys.argv = ["triptych", *request.arguments]


def run_and_leave() -> NoReturn:
    """The `triptych` command, which has cleaned up when it returns. The interpreter is not taken down as well: freeing what
    was imported would copy its 200 MB first (measured: 0.4 s of CPU, of each fork)."""
    status: object = 0
    try:
        importlib.import_module("triptych.services.cli").main()
    except SystemExit as ended:
        status = ended.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def main() -> None:
    """Entry point of the template, and then of each fork."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write to every page that the forks share
    if serve_forks(control, int(sys.argv[2])) is not None:
        run_and_leave()


if __name__ == "__main__":
    main()
