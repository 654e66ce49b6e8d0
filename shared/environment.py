"""What a process of ours has in its environment before it imports torch: thread counts, and patience with name servers."""

from __future__ import annotations

import os

from triptych.shared.machine import num_cores
from triptych.shared.settings import Settings

# c10d looks up the name of every address that a TCPStore client connects to, even 127.0.0.1: behind a name server that drops
# a query, glibc's own patience (5 s, twice) holds up a transfer pair for that long (measured). Seconds, and tries per server.
RESOLVER_OPTIONS = "timeout:1 attempts:2"
# A thread that goes to sleep between any two products of a decode step takes a third longer than one that looks around so often
# first (measured, 16 sequences on two idle cores: 42 and 32 ms; beside a busy third thread: 48 and 56; with 5000: 108)
SPIN_COUNT = 500


def process_environment(settings: Settings, is_engine: bool) -> dict[str, str]:
    """Two busy OpenMP threads per process on shared cores cost a factor of 25 (measured, 15.5 against 0.6 tokens/s): threads
    are bounded and soon wait passively. What is no engine gets one thread. The user's own RES_OPTIONS are kept."""
    num_threads = (settings.threads or max(1, num_cores() // settings.engine_instances)) if is_engine else 1
    return {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads)),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": str(SPIN_COUNT),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # of a router: that there is no torch
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", RESOLVER_OPTIONS),
    }
