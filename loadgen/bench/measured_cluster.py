"""The cluster that a benchmark measures, and a client of it in which no request waits for a connection."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from triptych.loadgen.cluster import running_cluster
from triptych.shared.console import progress_console

REQUEST_TIMEOUT_S = 120.0  # chosen


@contextlib.asynccontextmanager
async def measured_cluster(
    model: Path | str, options: Sequence[str] = ()
) -> AsyncIterator[tuple[dict[str, Any], aiohttp.ClientSession]]:
    """What `triptych up` tells when it is ready, started with these options; and the client.

    Raises:
        ClusterFailed: it ended before it was ready.
    """
    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    with tempfile.TemporaryDirectory() as logs:
        async with (
            running_cluster(model, Path(logs), progress_console(), options) as info,
            aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
        ):
            yield info, http
