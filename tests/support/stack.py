"""docker-compose.yml as one project of containers: built, started under a name of its own, taken down with its volumes."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCALE = ("--scale", "encoder=2", "--scale", "decode=2")
BUILD_TIMEOUT_S = 900.0  # chosen: torch and the other dependencies are installed in the image
START_TIMEOUT_S = 300.0  # chosen: ten processes on two cores, of which six load torch
COMMAND_TIMEOUT_S = 60.0


class Stack:
    """`docker compose` for one project. url is the router's, on 127.0.0.1 and a port that Docker chose."""

    def __init__(self) -> None:
        self.project = f"triptych-test-{uuid.uuid4().hex[:8]}"
        self.environment = {**os.environ, "TRIPTYCH_PORT": "0"}
        self.url = ""

    def compose(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        command = ["docker", "compose", "--project-name", self.project, "--progress", "plain", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def up(self) -> None:
        self.compose("build", timeout_s=BUILD_TIMEOUT_S)
        try:
            wait = ("--wait", "--wait-timeout", str(int(START_TIMEOUT_S)))
            self.compose("up", "--detach", "--no-build", *wait, *SCALE, timeout_s=START_TIMEOUT_S + COMMAND_TIMEOUT_S)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
        self.url = "http://" + self.compose("port", "router", "8000").strip()

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")[-20_000:]

    def containers(self) -> list[dict[str, Any]]:
        """`docker inspect` of every container of the project, the finished ones too."""
        ids = self.compose("ps", "--all", "--quiet").split()
        done = subprocess.run(
            ["docker", "inspect", *ids], capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
        )
        return list(json.loads(done.stdout))

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "40", timeout_s=2 * COMMAND_TIMEOUT_S)
