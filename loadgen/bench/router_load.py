"""What a text request costs the router: CPU per request behind the cluster's own stages, then CPU and requests/s behind
stubs of them (stub_stages.py), which no model slows down. Used by bench latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import psutil  # type: ignore[import-untyped]

from triptych.loadgen.bench.runner import BenchFailed
from triptych.loadgen.child_process import wait_or_kill
from triptych.loadgen.client import chat_body
from triptych.shared.tied_exec import tied

NUM_TOKENS = 64  # of the prompt, about, and of the answer
PICTURE_EVERY = 4  # chosen: where there are pictures, one request in four has one
REPLACED = ("prefill-0", "decode-0")
DRAIN_TIMEOUT_S = 60.0  # chosen: longer than drain_timeout_s
END_TIMEOUT_S = 30.0  # chosen


@dataclass(frozen=True, slots=True)
class Load:
    """num_requests in all, `concurrency` at a time: each client sends its next when its last is answered."""

    num_requests: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class RouterUnderTest:
    """pid: of the router's process. picture: PNG, for every PICTURE_EVERYth request."""

    http: aiohttp.ClientSession
    url: str
    pid: int
    picture: bytes | None = None

    async def measure(self, load: Load, may_lose: bool = False) -> dict[str, float]:
        """cpu_ms per request, requests_per_s, how busy the router was (cores), and num_lost.

        Raises:
            BenchFailed: a request was not answered, unless may_lose.
        """
        process = psutil.Process(self.pid)
        pending, num_lost = iter(range(load.num_requests)), 0

        async def client() -> None:
            nonlocal num_lost
            for number in pending:
                try:
                    await self._ask(number)
                except (BenchFailed, aiohttp.ClientError, TimeoutError):
                    num_lost += 1
                    if not may_lose:
                        raise

        before_s, began_s = _cpu_s(process), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(load.concurrency):
                    clients.create_task(client())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        spent_s, cpu_s = time.perf_counter() - began_s, _cpu_s(process) - before_s
        return {
            "cpu_ms": 1000 * cpu_s / load.num_requests,
            "requests_per_s": load.num_requests / spent_s,
            "busy_cores": cpu_s / spent_s,
            "num_lost": num_lost,
        }

    async def _ask(self, number: int) -> None:
        rng = random.Random(number)
        text = " ".join(str(rng.randrange(10)) for _ in range(NUM_TOKENS // 2))  # a digit, and a space: two tokens at most
        pictures = [self.picture] if self.picture is not None and number % PICTURE_EVERY == 0 else []
        body = chat_body(text, pictures, NUM_TOKENS, ignore_eos=True)
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            answer = await response.read()
        if response.status != 200 or not answer.endswith(b"data: [DONE]\n\n"):
            raise BenchFailed(f"the router answered with status {response.status}: {answer[-300:]!r}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def stub_stages(nats_url: str, model: str) -> AsyncIterator[None]:
    """Stubs of prefill and decode in place of the cluster's own, which are drained (and stay away)."""
    environment = {**os.environ, "TRIPTYCH_NATS_URL": nats_url, "PYTHONSAFEPATH": "1"}
    process = await asyncio.create_subprocess_exec(
        *tied(sys.executable, "-m", "triptych.loadgen.bench.stub_stages"),
        env={**environment, "TRIPTYCH_MODEL": model},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        for name in REPLACED:
            await _drain(name, environment)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await wait_or_kill(process, END_TIMEOUT_S)


async def _drain(name: str, environment: dict[str, str]) -> None:
    command = (sys.executable, "-m", "triptych.services.cli", "drain", name)
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DRAIN_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise BenchFailed(f"{name} did not drain within {DRAIN_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise BenchFailed(f"could not drain {name}: {output.decode(errors='replace')[-500:]}")
