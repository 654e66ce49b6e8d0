"""`vllm serve` for bench cluster: from an interpreter of its own, with its caches on; all of its processes end with the bench.
It loads, and may compile, for minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from triptych.loadgen.bench.runner import BenchFailed
from triptych.loadgen.child_process import wait_or_kill
from triptych.shared.tied_exec import tied

START_TIMEOUT_S = 600.0  # chosen: as for bench engine, it may compile the model first
STOP_TIMEOUT_S = 20.0  # chosen
POLL_EVERY_S = 0.5
TELL_EVERY_S = 10.0  # chosen
LOG_TAIL_CHARS = 3000
HOST = "127.0.0.1"
DEFAULTS = {  # the user's own environment wins
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound ones leave a core of its own to the front end, if there is one
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class VllmServerOptions:
    """python: an interpreter that can import vllm. max_images: of a prompt."""

    python: Path
    model: Path
    kv_cache_bytes: int
    max_model_len: int
    max_images: int
    num_threads: int

    def command(self, port: int) -> list[str]:
        """Prefix caching and the cache of pictures are on by default; the first is named since it is what is compared."""
        options: dict[str, object] = {
            "--host": HOST,
            "--port": port,
            "--dtype": "float32",
            "--max-model-len": self.max_model_len,
            "--kv-cache-memory-bytes": self.kv_cache_bytes,
            "--limit-mm-per-prompt": json.dumps({"image": self.max_images, "video": 0}),
        }
        flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        given = [str(part) for option in options.items() for part in option]
        return [str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model), *given, *flags]


@contextlib.asynccontextmanager
async def vllm_server(options: VllmServerOptions, console: Console) -> AsyncIterator[str]:
    """Its URL, once it is ready.

    Raises:
        BenchFailed: it ended before, or took too long.
    """
    port = _free_port()
    environment = {**DEFAULTS, "OMP_NUM_THREADS": str(options.num_threads), **os.environ}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "vllm.log").open("w+", errors="replace") as log:
        # In a folder of its own: `vllm` may be the name of another one here. A session of its own: see cluster.py
        process = await asyncio.create_subprocess_exec(
            *tied(*options.command(port)),
            env=environment,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            url = f"http://{HOST}:{port}"
            try:
                await _until_ready(process, url, console)
            except BenchFailed as error:
                log.seek(0)
                raise BenchFailed(f"{error}; it says:\n{log.read()[-LOG_TAIL_CHARS:]}") from None
            yield url
        finally:
            await _end(process)


async def _until_ready(process: asyncio.subprocess.Process, url: str, console: Console) -> None:
    began_s = told_s = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POLL_EVERY_S)) as http:
        while not await _is_ready(http, url):
            now_s = time.monotonic()
            if process.returncode is not None:
                raise BenchFailed(f"vLLM ended with status {process.returncode} before it was ready")
            if now_s - began_s > START_TIMEOUT_S:
                raise BenchFailed(f"vLLM was not ready within {START_TIMEOUT_S:.0f} s")
            if now_s - told_s >= TELL_EVERY_S:
                console.print(f"vLLM has been starting for {now_s - began_s:.0f} s ...", style="dim", highlight=False)
                told_s = now_s
            await asyncio.sleep(POLL_EVERY_S)


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, OSError):  # TimeoutError is one of the latter
        async with http.get(f"{url}/health") as response:
            return response.status == 200
    return False


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its engine is a process of its own, which outlives a front end that was killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        await wait_or_kill(process, STOP_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    """vLLM takes no socket that somebody else bound, and does not tell which port it took."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
