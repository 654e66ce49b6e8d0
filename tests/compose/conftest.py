"""One cluster of containers for all compose tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from support.reference import Reference
from support.stack import COMMAND_TIMEOUT_S, Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    assert engine.returncode == 0, f"no Docker engine answers: {engine.stderr}"
    made = Stack()
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture(scope="session")
def stack_reference(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """transformers on the very files that the containers serve."""
    folder = tmp_path_factory.mktemp("from-container")
    stack.compose("cp", "router:/checkpoints/tiny", str(folder))
    return Reference(folder / "tiny", tmp_path_factory.mktemp("reference"))
