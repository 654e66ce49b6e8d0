"""What the tests of a router before stages without a model share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.fake_stages import MODEL, World, write_toy_checkpoint


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy") / MODEL)


@pytest.fixture
async def world(toy_checkpoint: Path) -> AsyncIterator[World]:
    """Without stages. Every test must leave nothing behind."""
    async with World(toy_checkpoint, stage_wait_s=1.0) as made:
        yield made
        await made.settled()


@pytest.fixture
async def caching_world(toy_checkpoint: Path) -> AsyncIterator[World]:
    """Its stages keep what they made, in small blocks, and tell the index."""
    async with World(toy_checkpoint, stage_wait_s=1.0, block_size=4) as made:
        made.is_caching = True
        yield made
        await made.settled()
