"""Paged attention against dense attention written out, for batches of every kind of chunk."""

from __future__ import annotations

import itertools
import random

import psutil
import pytest
import torch

from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.attention import paged_attention
from triptych.shared.engine.batch_plan import BatchPlan, plan_batch
from triptych.shared.engine.kv_cache import KvCache
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 2, 6, 2, 8
SCALE = 0.3


class Layer(torch.nn.Module):
    """What paged_attention reads of an attention module."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def dense(query_NH: torch.Tensor, keys_SKH: torch.Tensor, values_SKH: torch.Tensor) -> torch.Tensor:
    """One token over its whole context, head by head."""
    heads = []
    for head in range(NUM_HEADS):
        kv_head = head * NUM_KV_HEADS // NUM_HEADS
        weights = torch.softmax(keys_SKH[:, kv_head] @ query_NH[head] * SCALE, dim=0)
        heads.append(weights @ values_SKH[:, kv_head])
    return torch.stack(heads)


def assert_finishing(plan: BatchPlan, chunks: list[Chunk]) -> None:
    """The plan knows which chunks reach the end of their tokens, and where these end in the packed row."""
    ends = dict(zip(plan.order, itertools.accumulate(chunks[i].num_tokens for i in plan.order), strict=True))
    num_left = {i: len(c.sequence.token_ids) - c.sequence.num_computed_tokens for i, c in enumerate(chunks)}
    finishing = {i for i in plan.order if chunks[i].num_tokens == num_left[i]}
    rows = range(sum(chunk.num_tokens for chunk in chunks)) if plan.last_rows is None else plan.last_rows.tolist()
    assert set(plan.finishing) == finishing
    assert list(rows) == [ends[i] - 1 for i in plan.finishing]


@pytest.mark.parametrize("seed", range(6))
def test_any_batch_equals_dense_attention(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    block_size = rng.choice((1, 3, 16))
    pool = BlockPool(2400 // block_size)
    shape = (NUM_LAYERS, pool.num_blocks, 2, NUM_KV_HEADS, block_size, HEAD_SIZE)
    kv = KvCache(shape, torch.float32, torch.device("cpu"))
    lengths = [rng.choice((1, 2, 20, 21, 150)) for _ in range(6)]
    sequences = [Sequence(RequestId("r"), [0] * n, n, SamplingParams(max_tokens=1)) for n in lengths]
    scratch = pool.allocate(pool.num_blocks)
    rng.shuffle(scratch)
    pool.free(scratch)  # blocks now come in random order
    for sequence in sequences:
        sequence.block_table = pool.allocate(-(-len(sequence.token_ids) // block_size) + rng.randrange(2))
    history = [torch.zeros(NUM_LAYERS, 2, n, NUM_KV_HEADS, HEAD_SIZE) for n in lengths]
    while left := [i for i, s in enumerate(sequences) if s.num_computed_tokens < lengths[i]]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        chunks = []
        for i in chosen:
            remaining = lengths[i] - sequences[i].num_computed_tokens
            chunks.append(Chunk(sequences[i], min(remaining, rng.choice((1, 1, 2, 19, 140)))))
        plan = plan_batch(chunks, kv)
        assert sorted(plan.order) == list(range(len(chunks)))
        assert_finishing(plan, chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        for layer in range(NUM_LAYERS):
            query = torch.randn(1, NUM_HEADS, num_tokens, HEAD_SIZE)
            key, value = torch.randn(2, 1, NUM_KV_HEADS, num_tokens, HEAD_SIZE).unbind()
            output, _ = paged_attention(Layer(layer), query, key, value, None, scaling=SCALE, plan=plan)
            output_TNH = output.view(num_tokens, NUM_HEADS, HEAD_SIZE)
            row = 0
            for j in plan.order:
                past = history[chosen[j]][layer]
                for index in range(
                    chunks[j].sequence.num_computed_tokens, chunks[j].sequence.num_computed_tokens + chunks[j].num_tokens
                ):
                    past[0, index], past[1, index] = key[0, :, row], value[0, :, row]
                    expected = dense(query[0, :, row], past[0, : index + 1], past[1, : index + 1])
                    torch.testing.assert_close(output_TNH[row], expected, rtol=1e-4, atol=1e-5)
                    row += 1
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens


def test_sequences_of_very_different_lengths_attend_apart() -> None:
    kv = KvCache((1, 400, 2, 1, 16, 8), torch.float32, torch.device("cpu"))
    sequences = [Sequence(RequestId("r"), [0] * n, n, SamplingParams(max_tokens=1)) for n in (20, 5000, 4000, 30)]
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        sequence.block_table = [0] * (len(sequence.token_ids) // 16 + 1)
    plan = plan_batch([Chunk(s, 1) for s in sequences], kv)
    assert plan.order == [1, 2, 3, 0]
    assert [(part.begin, part.end) for part in plan.parts] == [(0, 2), (2, 4)]


def test_padding_reads_no_block_of_another_request() -> None:
    """Its KV may be broken: a masked NaN is still multiplied."""
    kv = KvCache((1, 8, 2, NUM_KV_HEADS, 4, HEAD_SIZE), torch.float32, torch.device("cpu"))
    kv.import_(torch.full((1, 1, 2, NUM_KV_HEADS, 4, HEAD_SIZE), float("nan")), [0])
    short = Sequence(RequestId("short"), [0] * 3, 3, SamplingParams(max_tokens=1), block_table=[1], num_computed_tokens=2)
    long = Sequence(RequestId("long"), [0] * 15, 15, SamplingParams(max_tokens=1), block_table=[2, 3, 4, 5])
    long.num_computed_tokens = 14
    plan = plan_batch([Chunk(short, 1), Chunk(long, 1)], kv)
    assert len(plan.parts) == 1, "they attend together"
    query, key = torch.randn(1, NUM_HEADS, 2, HEAD_SIZE), torch.randn(1, NUM_KV_HEADS, 2, HEAD_SIZE)
    output, _ = paged_attention(Layer(0), query, key, key, None, scaling=SCALE, plan=plan)
    assert bool(output.isfinite().all())


def test_the_cache_takes_memory_only_where_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    kv = KvCache((1, 1 << 14, 2, 8, 16, 32), torch.float32, torch.device("cpu"))  # 512 MiB
    context = kv.context([[5], [(1 << 14) - 1]], 15)
    context.read(0, torch.empty(0))
    assert process.memory_info().rss - before < 128 << 20
    assert context.keys.shape == context.values.shape == (2, 8, 15, 32)
    assert not context.target.any()


def test_what_is_gathered_at_once_is_bounded() -> None:
    """Groups of equally long contexts, too: what they read should stay in the caches."""
    kv = KvCache((1, 400, 2, 8, 16, 64), torch.float32, torch.device("cpu"))
    sequences = [Sequence(RequestId("r"), [0] * 500, 500, SamplingParams(max_tokens=1)) for _ in range(7)]
    for sequence in sequences:
        sequence.num_computed_tokens, sequence.block_table = 499, list(range(32))
    plan = plan_batch([Chunk(s, 1) for s in sequences], kv)
    assert [part.end - part.begin for part in plan.parts] == [4, 3]
    assert plan.last_rows is None, "all rows are asked for"
