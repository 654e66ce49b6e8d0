"""What all tests share: a clean environment, numbers of examples, and the `tiny` checkpoint, made once per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch or transformers: offline, and one thread, since several processes share the cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # see shared/environment.py

# Examples of each property: some in every run, many in `make test-long`. Without a deadline: other tests take the cores.
for profile, num_examples in (("short", 30), ("long", 300)):
    settings.register_profile(profile, max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("short")


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """The developer's own TRIPTYCH_* settings don't change what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the seeded random checkpoint for tests."""
    from triptych.loadgen.checkpoint import make_checkpoint  # imports torch: only tests that need it should wait for that

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint("tiny", folder)
    return folder
