"""What is kept of a decoding group from step to step is what gathering it would give, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from triptych.shared.engine import kv_mirror
from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.batch_plan import plan_batch
from triptych.shared.engine.kv_cache import KvCache
from triptych.shared.engine.kv_mirror import Mirror, Mirrors
from triptych.shared.messages import RequestId
from triptych.shared.sampling_params import SamplingParams

NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, NUM_BLOCKS = 2, 2, 4, 8, 120


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_mirror, "LEAST_BYTES", 0)


class Decoder:
    """A cache with mirrors, whose batches write random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = (NUM_LAYERS, NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        self.kv = KvCache(shape, torch.float32, torch.device("cpu"))
        self.mirrors = Mirrors(self.kv)

    def run(self, sequences: list[Sequence], sizes: list[int] | None = None, num_layers: int = NUM_LAYERS) -> list[bool]:
        """One batch, each context compared with the blocks. Of each part: whether it was kept from the batch before."""
        chunks = [Chunk(s, n) for s, n in zip(sequences, sizes or [1] * len(sequences), strict=True)]
        for chunk in chunks:
            end = chunk.sequence.num_computed_tokens + chunk.num_tokens
            chunk.sequence.token_ids += [0] * (end - len(chunk.sequence.token_ids))
        plan = plan_batch(chunks, self.kv, self.mirrors)
        ordered = [chunks[i] for i in plan.order]
        for layer in range(num_layers):
            kv_T2KH = torch.randn(sum(c.num_tokens for c in chunks), 2 * NUM_KV_HEADS, HEAD_SIZE)
            self.kv.write(layer, plan.places, kv_T2KH)
            for part in plan.parts:
                if part.is_group and part.context is not None:
                    keys_values = part.context.read(layer, kv_T2KH[part.begin : part.end])
                    self._compare(layer, keys_values, [c.sequence for c in ordered[part.begin : part.end]])
        if num_layers == NUM_LAYERS:
            for chunk in chunks:
                chunk.sequence.num_computed_tokens += chunk.num_tokens
        return [isinstance(part.context, Mirror) and part.context.index is None for part in plan.parts]

    def _compare(self, layer: int, keys_values: tuple[torch.Tensor, torch.Tensor], sequences: list[Sequence]) -> None:
        for row, sequence in enumerate(sequences):
            num_ctx = sequence.num_computed_tokens + 1
            blocks = self.kv.export(sequence.block_table, None)[layer]  # [blocks, 2, K, BS, H]
            expected = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_ctx]
            for found, kind in zip(keys_values, expected, strict=True):
                assert torch.equal(found[row, :, :num_ctx], kind)
                assert bool(found[row].isfinite().all()), "a masked NaN still spreads"


def sequence(blocks: range, num_tokens: int) -> Sequence:
    made = Sequence(RequestId("r"), [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1), block_table=list(blocks))
    made.num_computed_tokens = num_tokens - 1
    return made


def group() -> list[Sequence]:
    return [sequence(range(30), 30), sequence(range(30, 60), 30), sequence(range(60, 90), 9)]


def numbers(num_blocks: int, value: float = 7.0) -> torch.Tensor:
    return torch.full((NUM_LAYERS, num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE), value)


def test_a_group_is_kept_until_it_is_full() -> None:
    decoder, sequences = Decoder(), group()
    kept = [decoder.run(sequences)[0] for _ in range(80)]
    assert kept[0] is False
    assert kept[1:60] == [True] * 59
    assert kept.count(False) == 2


def test_tables_may_grow() -> None:
    decoder, grown = Decoder(), sequence(range(3), 11)
    for step in range(12):
        assert decoder.run([grown]) == [step > 0]
        if grown.num_computed_tokens == len(grown.block_table) * BLOCK_SIZE:
            grown.block_table.append(90 + step)


def leaves_and_another_has_its_blocks(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Of the same length: an import filled them."""
    left = sequences[1]
    decoder.kv.import_(numbers(len(left.block_table)), left.block_table)
    sequences[1] = sequence(range(30, 60), left.num_computed_tokens + 1)


def is_computed_again(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Another prompt in the same blocks, as far as the one before it was."""
    left = sequences[1]
    sequences[1] = sequence(range(30, 60), left.num_computed_tokens + 1)
    sequences[1].num_computed_tokens = 0
    decoder.run([sequences[1]], [left.num_computed_tokens])


def imports_into_a_block(decoder: Decoder, sequences: list[Sequence]) -> None:
    decoder.kv.import_(numbers(1), sequences[2].block_table[:1])


def is_preempted_and_resumed_elsewhere(decoder: Decoder, sequences: list[Sequence]) -> None:
    moved = sequences[0]
    blocks = decoder.kv.export(moved.block_table, None)
    moved.block_table = list(range(90, 120))
    decoder.kv.import_(blocks, moved.block_table)


def changes_its_order(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Two of the same length."""
    sequences[0], sequences[1] = sequences[1], sequences[0]


def has_another_block(decoder: Decoder, sequences: list[Sequence]) -> None:
    """In the list that it had before."""
    sequences[1].block_table[2] = 100


def decodes_in_part(decoder: Decoder, sequences: list[Sequence]) -> None:
    decoder.run(sequences[:2])


def takes_two_tokens(decoder: Decoder, sequences: list[Sequence]) -> None:
    decoder.run(sequences, [2, 1, 2])


def fails_after_the_first_layer(decoder: Decoder, sequences: list[Sequence]) -> None:
    decoder.run(sequences, num_layers=1)


CHANGES = [
    leaves_and_another_has_its_blocks,
    is_computed_again,
    imports_into_a_block,
    is_preempted_and_resumed_elsewhere,
    changes_its_order,
    has_another_block,
    decodes_in_part,
    takes_two_tokens,
    fails_after_the_first_layer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changed_is_not_believed(change: Callable[[Decoder, list[Sequence]], None]) -> None:
    decoder, sequences = Decoder(), group()
    for _ in range(3):
        decoder.run(sequences)
    change(decoder, sequences)
    assert decoder.run(sequences) == [False]
    assert decoder.run(sequences) == [True]


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_things(seed: int) -> None:
    rng, decoder = random.Random(seed), Decoder()
    tables = [range(start, start + 30) for start in range(0, NUM_BLOCKS, 30)]
    running = [sequence(table, rng.randint(2, 40)) for table in tables]
    kept = 0
    for _ in range(120):
        event, i = rng.random(), rng.randrange(len(running))
        if event < 0.1 or running[i].num_computed_tokens > 100:
            decoder.kv.import_(numbers(30, rng.random()), running[i].block_table)
            running[i] = sequence(tables[i], rng.randint(2, 40))
        chosen = running if event < 0.8 else rng.sample(running, 2)
        sizes = [1 if event < 0.9 else rng.randint(1, 3) for _ in chosen]
        kept += sum(decoder.run(chosen, sizes))
    assert kept > 20


def test_all_mirrors_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, sequences = Decoder(), group()
    monkeypatch.setattr(kv_mirror, "MOST_BYTES", 1000)
    assert [decoder.run(sequences) for _ in range(3)] == [[False]] * 3
