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
from triptych.shared.engine.paged_group import MAX_KEPT, PagedGroups
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


@pytest.fixture(params=[True, False], ids=["paged", "gathered"])
def is_paged(request: pytest.FixtureRequest) -> bool:
    """Whether groups attend straight from their blocks."""
    return bool(request.param)


def groups_of(kv: KvCache, is_paged: bool) -> PagedGroups | None:
    return PagedGroups(kv, NUM_HEADS) if is_paged else None


@pytest.mark.parametrize("seed", range(6))
def test_any_batch_equals_dense_attention(seed: int, is_paged: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    block_size = rng.choice((1, 3, 16))
    pool = BlockPool(2400 // block_size)
    shape = (NUM_LAYERS, pool.num_blocks, 2, NUM_KV_HEADS, block_size, HEAD_SIZE)
    kv = KvCache(shape, torch.float32, torch.device("cpu"))
    paged = groups_of(kv, is_paged)
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
        plan = plan_batch(chunks, kv, paged)
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


def attend_once(kv: KvCache, sequences: list[Sequence], is_paged: bool) -> torch.Tensor:
    """[sequences, ...] of the first layer, longest context first."""
    plan = plan_batch([Chunk(s, 1) for s in sequences], kv, groups_of(kv, is_paged))
    assert len(plan.parts) == 1, "they attend together"
    query, key = torch.randn(1, NUM_HEADS, len(sequences), HEAD_SIZE), torch.randn(1, NUM_KV_HEADS, len(sequences), HEAD_SIZE)
    return paged_attention(Layer(0), query, key, key, None, scaling=SCALE, plan=plan)[0][0]


def decoding(blocks: list[int], num_tokens: int) -> Sequence:
    made = Sequence(RequestId("r"), [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1), block_table=blocks)
    made.num_computed_tokens = num_tokens - 1
    return made


def test_broken_kv_of_one_request_reaches_no_other(is_paged: bool) -> None:
    """A masked NaN is still multiplied: padding is of a sequence's own blocks."""
    kv = KvCache((1, 8, 2, NUM_KV_HEADS, 4, HEAD_SIZE), torch.float32, torch.device("cpu"))
    kv.import_(torch.full((1, 2, 2, NUM_KV_HEADS, 4, HEAD_SIZE), float("nan")), [0, 6])
    sequences = [decoding([2, 3, 4, 5], 15), decoding([6, 7], 8), decoding([1], 3)]
    assert attend_once(kv, sequences, is_paged).isfinite().all(1).tolist() == [True, False, True]


def test_what_an_earlier_request_left_behind_is_not_read() -> None:
    kv = KvCache((1, 8, 2, NUM_KV_HEADS, 4, HEAD_SIZE), torch.float32, torch.device("cpu"))
    kv.import_(torch.full((1, 8, 2, NUM_KV_HEADS, 4, HEAD_SIZE), float("nan")), list(range(8)))
    assert bool(attend_once(kv, [decoding([2], 1), decoding([3], 1)], is_paged=True).isfinite().all())
    kv.import_(torch.ones(1, 2, 2, NUM_KV_HEADS, 4, HEAD_SIZE), [0, 1])
    assert bool(attend_once(kv, [decoding([0, 1], 8), decoding([4], 1)], is_paged=True).isfinite().all())


def test_blocks_that_were_exchanged_between_two_steps_are_seen() -> None:
    """A sequence goes on with another's blocks, grows, or is one of other sequences: its table is changed in place."""
    kv = KvCache((1, 8, 2, NUM_KV_HEADS, 4, HEAD_SIZE), torch.float32, torch.device("cpu"))
    groups, tables = PagedGroups(kv, NUM_HEADS), [[0, 1], [2, 3]]
    groups.group(tables, [8, 7])
    tables[0][1] = 5
    tables[1].append(6)
    for some, num_ctx in ((tables, [8, 8]), (tables[1:], [9]), (tables, [8, 7])):
        expected = PagedGroups(kv, NUM_HEADS).group(some, num_ctx).rows
        assert torch.equal(groups.group(some, num_ctx).rows, expected)


def test_rows_are_kept_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of a sequence whose blocks have changed are laid out anew, and not those of every sequence that ever ran."""
    kv = KvCache((1, 400, 2, NUM_KV_HEADS, 4, HEAD_SIZE), torch.float32, torch.device("cpu"))
    made: list[list[list[int]]] = []
    first_rows = kv.first_rows

    def counted(tables: list[list[int]], num_tokens: int) -> torch.Tensor:
        made.append([table.copy() for table in tables])
        return first_rows(tables, num_tokens)

    monkeypatch.setattr(kv, "first_rows", counted)
    paged = PagedGroups(kv, NUM_HEADS)
    sequences = [decoding(list(range(200)), 790), decoding([210, 211], 6), decoding([220, 221], 5)]
    for some in (sequences, sequences[1:], sequences):
        assert len(plan_batch([Chunk(one, 1) for one in some], kv, paged).parts) == 1
    assert len(made) == 3
    sequences[1].block_table.append(212)
    plan_batch([Chunk(one, 1) for one in sequences], kv, paged)
    assert made[3:] == [[[210, 211, 212]]]
    for block in range(MAX_KEPT):
        paged.group([[block]], [1])
    assert len(paged._kept) == MAX_KEPT


def test_the_cache_takes_memory_only_where_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    kv = KvCache((1, 1 << 14, 2, 8, 16, 32), torch.float32, torch.device("cpu"))  # 512 MiB
    context = kv.context([[5], [(1 << 14) - 1]], 15)
    kv.gather(0, context)
    assert process.memory_info().rss - before < 128 << 20
    assert context.keys.shape == context.values.shape == (2, 8, 15, 32)
    assert not context.target.any()
