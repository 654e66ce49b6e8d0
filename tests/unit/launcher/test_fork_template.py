"""How a fork of the template ends."""

from __future__ import annotations

import subprocess
import sys

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
