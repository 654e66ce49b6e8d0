"""Bench cluster's other side, by a stand-in for vLLM's interpreter: started, waited for, ended with all its processes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from rich.console import Console

from triptych.loadgen.bench.runner import BenchFailed
from triptych.loadgen.bench.vllm_server import VllmServerOptions, vllm_server

SERVER = f"""#!{sys.executable}
import http.server, pathlib, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({{pid_file!r}}).write_text(str(engine.pid))

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
BROKEN = f"""#!{sys.executable}
print("no model like that")
raise SystemExit(3)
"""


def options(tmp_path: Path, script: str) -> VllmServerOptions:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o700)
    return VllmServerOptions(python, tmp_path, 1 << 20, 100, 2, 1)


async def test_it_is_ready_and_ends_with_its_engine(tmp_path: Path) -> None:
    pid_file = tmp_path / "engine.pid"
    console = Console(file=io.StringIO())
    async with vllm_server(options(tmp_path, SERVER.format(pid_file=str(pid_file))), console) as url:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
            assert response.status == 200
        engine = psutil.Process(int(pid_file.read_text()))
        assert engine.is_running()
    psutil.wait_procs([engine], timeout=10)
    assert not engine.is_running()


async def test_what_it_says_when_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"status 3 before it was ready; it says:\nno model like that"):
        async with vllm_server(options(tmp_path, BROKEN), Console(file=io.StringIO())):
            pass
