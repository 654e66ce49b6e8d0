"""How many threads a process of ours computes with, as the environment that OpenMP and its kin read at start."""

from __future__ import annotations

import os

from triptych.shared.settings import Settings


def thread_environment(settings: Settings, is_engine: bool) -> dict[str, str]:
    """To be set before torch is imported. Two busy OpenMP threads per process on shared cores cost a factor of 25 (measured,
    15.5 against 0.6 tokens/s): threads are bounded and wait passively. What is no engine gets one thread."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = (settings.threads or max(1, num_cores // settings.engine_instances)) if is_engine else 1
    bounded = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(bounded, str(num_threads)) | {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
