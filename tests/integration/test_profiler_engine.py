"""The profiler's passes on the real engine: each runs, takes time, and gives back what it took."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from triptych.services.engine_host import open_engine
from triptych.services.profiler.engine_passes import EnginePasses
from triptych.services.profiler.grid import QUICK, Limits, decode_batches, encode_batches, prefill_steps
from triptych.shared.checkpoint import Checkpoint, open_checkpoint
from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.engine.api import Engine
from triptych.shared.errors import Overloaded
from triptych.shared.settings import Settings


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    return open_engine(Settings(model=str(checkpoint.path), kv_cache_bytes=16 << 20), num_threads=1)


def test_every_kind_of_pass_runs_and_frees_its_blocks(engine: Engine, checkpoint: Checkpoint) -> None:
    limits = Limits.of(Settings(), engine.model_card.max_model_len, engine.block_pool.num_blocks * 16, checkpoint.image)
    passes = EnginePasses(engine, checkpoint, False, time.perf_counter)
    smallest, largest = encode_batches(QUICK, limits)[0], encode_batches(QUICK, limits)[-1]
    assert passes.embedding_bytes_per_token(smallest) == 128 * 4  # tiny's hidden size, float32
    seconds = [
        passes.encode(smallest),
        passes.encode(largest),
        passes.prefill([PrefillChunk(16, 512)]),
        passes.prefill([PrefillChunk(16)] * 4),
        passes.decode(DecodeBatch(1, 2048)),
        passes.decode(DecodeBatch(8, 8 * 32)),
        passes.move_kv(1),
        passes.move_kv(engine.block_pool.num_blocks // 2),
    ]
    assert min(seconds) > 0
    assert seconds[1] > seconds[0]
    assert engine.block_pool.num_free == engine.block_pool.num_blocks


def test_a_pass_that_does_not_fit_takes_nothing(engine: Engine, checkpoint: Checkpoint) -> None:
    passes = EnginePasses(engine, checkpoint, False, time.perf_counter)
    with pytest.raises(Overloaded, match="KV blocks are needed"):
        passes.decode(DecodeBatch(64, 64 * 4096))
    with pytest.raises(Overloaded):
        passes.move_kv(engine.block_pool.num_blocks - 1)
    assert engine.block_pool.num_free == engine.block_pool.num_blocks


def test_the_grid_fits_the_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """The most of each kind, as `triptych profile` would do it."""
    limits = Limits.of(Settings(), engine.model_card.max_model_len, engine.block_pool.num_blocks * 16, checkpoint.image)
    passes = EnginePasses(engine, checkpoint, False, time.perf_counter)
    step = max(prefill_steps(QUICK, limits), key=lambda s: sum(c.num_tokens + c.num_context_tokens for c in s))
    batch = max(decode_batches(QUICK, limits), key=lambda b: b.num_context_tokens)
    assert passes.prefill(step) > 0
    assert passes.decode(batch) > 0
