"""The end of a child process that was asked to leave, for the cluster of our own and the benchmarks' other sides."""

from __future__ import annotations

import asyncio


async def wait_or_kill(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Until it has ended; it is killed when that takes longer than timeout_s."""
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
