"""How a fork of the template ends, and one that nobody waits for any more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triptych.services.launcher.template import IS_SUPPORTED

CODE = """
import atexit, sys
from triptych.services.launcher.fork_template import run_and_leave
atexit.register(print, "taken down")
sys.argv = ["triptych", "serve", "nonsense"]
run_and_leave()
"""


def test_a_fork_leaves_with_its_status_and_what_it_said() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "unknown stage 'nonsense'" in done.stderr
    assert done.stdout == ""


IMPATIENT = """
import ctypes, os, socket, sys, time
import msgspec
from triptych.services.launcher.fork_template import ForkRequest, serve_forks
from triptych.services.launcher.template import PR_SET_CHILD_SUBREAPER
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
launcher_pid, (_, output) = os.getpid(), os.pipe()
socket.send_fds(ours, [msgspec.json.encode(ForkRequest("encoder-0", (), {}))], [output])
ours.close()
template = os.fork()
if template == 0:
    time.sleep(60 if serve_forks(theirs, launcher_pid) is not None else 0)
    os._exit(0)
theirs.close()
ended = dict(os.wait() for _ in range(2))
print(os.waitstatus_to_exitcode(ended.pop(template)), *map(os.waitstatus_to_exitcode, ended.values()))
"""


@pytest.mark.skipif(not IS_SUPPORTED, reason="Linux only")
def test_what_the_launcher_did_not_wait_for_does_not_live_beside_what_it_started() -> None:
    done = subprocess.run([sys.executable, "-c", IMPATIENT], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "0 -9\n", done.stderr
