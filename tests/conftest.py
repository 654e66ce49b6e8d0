"""What all tests share: a clean environment and the `tiny` checkpoint, made once per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch or transformers: offline, and one thread, since several processes share the cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # see shared/environment.py


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
