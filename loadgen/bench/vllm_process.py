"""vLLM for bench engine, in a process of its own with an interpreter of its own (see vllm_side.py). Loading takes minutes.

One process without a second for its front end, and unbound threads: its best on a CPU, measured (a small model decodes 290
instead of 190 tokens/s).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from triptych.loadgen.bench.engine_sides import Case, Timing
from triptych.loadgen.bench.runner import BenchFailed
from triptych.loadgen.child_process import wait_or_kill

SCRIPT = Path(__file__).with_name("vllm_side.py")
LOAD_TIMEOUT_S = 600.0  # chosen: it may compile the model first (measured: 84 s for a small one)
RUN_TIMEOUT_S = 900.0  # chosen: 32 prompts of 1,024 tokens through a model of 135 M parameters take minutes
STOP_TIMEOUT_S = 10.0  # chosen
LOG_TAIL_CHARS = 2000
DEFAULTS = {  # the user's own environment wins
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """python: an interpreter that can import vllm. num_token_ids: see EngineSide."""

    python: Path
    model: Path
    num_token_ids: int
    max_model_len: int
    max_num_seqs: int


class VllmSide:
    """Implements EngineSide. Made by `vllm_side`."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[str], options: VllmOptions) -> None:
        self._process = process
        self._log = log
        self._options = options

    async def run(self, case: Case, seed: int) -> Timing:
        assert self._process.stdin is not None
        order = {**asdict(case), "seed": seed, "num_token_ids": self._options.num_token_ids}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return Timing(**await self.read(RUN_TIMEOUT_S))

    async def read(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
            BenchFailed: vLLM ended, or took too long.
        """
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise BenchFailed(f"vLLM gave no answer within {timeout_s:.0f} s") from None
        if not line:
            self._log.seek(0)
            raise BenchFailed(f"vLLM ended:\n{self._log.read()[-LOG_TAIL_CHARS:]}")
        return json.loads(line)


@contextlib.asynccontextmanager
async def vllm_side(options: VllmOptions, num_threads: int) -> AsyncIterator[tuple[VllmSide, str]]:
    """The side, loaded, and vLLM's version."""
    environment = {**DEFAULTS, **os.environ, "OMP_NUM_THREADS": str(num_threads)}
    arguments = (str(options.model), str(options.max_model_len), str(options.max_num_seqs))
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = await asyncio.create_subprocess_exec(
            str(options.python),
            str(SCRIPT),
            *arguments,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            side = VllmSide(process, log, options)
            yield side, str((await side.read(LOAD_TIMEOUT_S))["version"])
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """It leaves when its stdin ends."""
    assert process.stdin is not None
    process.stdin.close()
    await wait_or_kill(process, STOP_TIMEOUT_S)
