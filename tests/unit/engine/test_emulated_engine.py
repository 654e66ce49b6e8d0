"""The emulated engine: what calls cost, that KV blocks are counted, and what it says."""

from __future__ import annotations

import json

import pytest

from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.cost_model.images import ImageShape
from triptych.shared.emulation import FOLDER, cost_model_of, num_slots, open_model
from triptych.shared.engine.api import Chunk, ImageSpan, Sequence
from triptych.shared.engine.emulated import EmulatedEngine
from triptych.shared.errors import InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import Settings
from triptych.shared.transport.stand_in import stand_in, stand_in_host_memory

QWEN, LLAMA = "qwen2.5-vl-7b", "llama-3.2-11b"


class Case:
    """An engine, and the modelled seconds of its last call."""

    def __init__(self, model: str = QWEN) -> None:
        self.settings = Settings(emulate="a100", model=model, kv_cache_bytes=8 << 30)
        self.cost = cost_model_of(self.settings)
        self.checkpoint = open_model(self.settings)
        self.spent_s: list[float] = []
        self.engine = EmulatedEngine(self.cost, self.checkpoint, self.settings, self.spent_s.append)

    def sequence(self, num_text: int, images: tuple[ImageInfo, ...] = (), **sampling: object) -> Sequence:
        """Text, then the pictures."""
        token_ids, spans = list(range(num_text)), []
        for image in images:
            spans.append(ImageSpan(len(token_ids), image, stand_in((image.num_tokens, 1))))
            token_ids += [self.checkpoint.image_token_id] * image.num_tokens
        params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
        made = Sequence(RequestId("r"), token_ids, len(token_ids), params, spans)
        made.block_table = self.engine.block_pool.allocate(num_blocks_for(len(token_ids) + 64, self.engine.block_size))
        self.engine.prepare(made)
        return made

    def picture(self, width: int, height: int, mm_hash: bytes = b"h") -> ImageInfo:
        shape = self.cost.image(width, height)
        grid = (shape.num_pieces, 1, shape.patches_per_piece)
        return ImageInfo(mm_hash, height, width, grid, num_slots(self.cost, shape.num_tokens))

    def generate(self, sequence: Sequence, count: int) -> list[int]:
        output = []
        for _ in range(count):
            [token] = self.engine.run([Chunk(sequence, len(sequence.token_ids) - sequence.num_computed_tokens)])
            assert token is not None
            sequence.token_ids.append(token)
            output.append(token)
        return output


def test_steps_cost_what_the_cost_model_says() -> None:
    case = Case()
    long, short = case.sequence(3000), case.sequence(100)
    case.engine.run([Chunk(long, 1000), Chunk(short, 100)])
    assert case.spent_s[-1] == case.cost.prefill_s([PrefillChunk(1000), PrefillChunk(100)])
    case.engine.run([Chunk(long, 2000)])
    assert case.spent_s[-1] == case.cost.prefill_s([PrefillChunk(2000, 1000)])
    for sequence in (long, short):
        sequence.token_ids.append(1)
    case.engine.run([Chunk(long, 1), Chunk(short, 1)])
    assert case.spent_s[-1] == case.cost.decode_s(DecodeBatch(2, 3100))


def test_pictures_cost_by_pieces_and_patches() -> None:
    for model in (QWEN, LLAMA):
        case = Case(model)
        pictures = [case.picture(896, 896), case.picture(300, 500)]
        embeddings = case.engine.encode(pictures, [stand_in((1,)), stand_in((1,))])
        assert case.spent_s[-1] == pytest.approx(case.cost.encode_s([case.cost.image(896, 896), case.cost.image(300, 500)]))
        shape: ImageShape = case.cost.image(896, 896)
        assert embeddings[0].shape[0] == pictures[0].num_tokens
        assert embeddings[0].nbytes == pytest.approx(case.cost.embedding_bytes(shape), rel=0.001)


def test_a_cross_attention_model_counts_text_and_pictures_apart() -> None:
    case = Case(LLAMA)
    picture = case.picture(896, 896)
    assert picture.num_tokens == 1601, "slots of KV; 6404 tokens of a quarter of their size"
    sequence = case.sequence(100, (picture,))
    case.engine.run([Chunk(sequence, 1000)])
    case.engine.run([Chunk(sequence, 701)])
    assert case.spent_s == [case.cost.prefill_s([PrefillChunk(100, 0, 6404)]), 0.0]
    sequence.token_ids.append(1)
    case.engine.run([Chunk(sequence, 1)])
    assert case.spent_s[-1] == case.cost.decode_s(DecodeBatch(1, 100, 6404))
    held_bytes = case.engine.exported_shape(1)[0]
    assert held_bytes == (1, 16, 131072)


def test_the_same_prompt_says_the_same_and_another_one_something_else() -> None:
    case, other = Case(), Case()
    said = case.generate(case.sequence(50), 20)
    assert said == other.generate(other.sequence(50), 20)
    assert said != case.generate(case.sequence(51), 20)
    pictures = [case.generate(case.sequence(50, (case.picture(56, 56, digest),)), 20) for digest in (b"a", b"b")]
    assert pictures[0] != pictures[1]
    seeded = [case.generate(case.sequence(50, temperature=1.0, seed=seed), 20) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    greedy = [case.generate(case.sequence(50, temperature=0.0, seed=seed), 20) for seed in (1, 2)]
    assert greedy[0] == greedy[1] == said


def test_decode_goes_on_without_the_prompt() -> None:
    """As a decode instance has it: zeros in its place, and the first token."""
    case = Case()
    said = case.generate(case.sequence(50), 20)
    moved = case.sequence(50)
    moved.token_ids, moved.num_computed_tokens = [0] * 50 + said[:1], 50
    assert case.generate(moved, 19) == said[1:]


def test_what_is_foreseen_is_what_comes_step_by_step() -> None:
    case, other = Case(), Case()
    end = case.checkpoint.eos_token_ids[0]
    ahead, stepwise = (
        [one.sequence(50, seed=5, temperature=1.0), one.sequence(90, stop_token_ids=(end,))] for one in (case, other)
    )
    for sequence in (*ahead, *stepwise):
        sequence.num_computed_tokens = len(sequence.token_ids)
        sequence.token_ids.append(1)
    outputs, steps_s = case.engine.foresee(ahead, 12)
    assert [sequence.num_computed_tokens for sequence in ahead] == [50, 90], "nothing has happened"
    made = []
    for _ in range(12):
        made.append(other.engine.run([Chunk(sequence, 1) for sequence in stepwise]))
        for sequence, token in zip(stepwise, made[-1], strict=True):
            assert token is not None
            sequence.token_ids.append(token)
    assert outputs == [list(tokens) for tokens in zip(*made, strict=True)]
    assert steps_s == other.spent_s[-12:]
    case.engine.advance(ahead[0], 12)
    assert ahead[0].num_computed_tokens == 62
    with pytest.raises(InternalError):
        case.engine.advance(ahead[0], 200)


def test_an_output_that_ends_is_the_end_of_what_is_foreseen() -> None:
    case = Case()
    end = case.checkpoint.eos_token_ids[0]
    ending = case.sequence(10, stop_token_ids=(end,), max_tokens=5000)
    ending.num_computed_tokens = 10
    ending.token_ids.append(1)
    [output], _ = case.engine.foresee([ending], 5000)
    assert output[-1] == end
    assert end not in output[:-1]
    outputs, steps_s = case.engine.foresee([ending, ending], len(output) - 3)
    assert [len(one) for one in outputs] == [len(steps_s)] * 2 == [len(output) - 3] * 2


def test_words_come_out_and_an_end_unless_it_is_ignored() -> None:
    case = Case()
    end = case.checkpoint.eos_token_ids[0]
    names = {id_: token for token, id_ in json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"].items()}
    assert all(names[token][1:].isalpha() for token in case.generate(case.sequence(9), 60))
    lengths = []
    for first in range(40):
        sequence = case.sequence(10 + first, stop_token_ids=(end,), max_tokens=5000, min_tokens=5)
        sequence.block_table = case.engine.block_pool.allocate(200)
        output = case.generate(sequence, 1)
        while output[-1] != end and len(output) < 3000:
            output += case.generate(sequence, 1)
        lengths.append(len(output))
        case.engine.block_pool.free(sequence.block_table)
    assert 100 < sum(lengths) / len(lengths) < 600
    assert min(lengths) > 5


def test_logprobs_where_they_are_asked_for() -> None:
    case = Case()
    sequence = case.sequence(9, num_logprobs=3)
    case.generate(sequence, 1)
    assert sequence.logprobs is not None
    assert len(sequence.logprobs.top) == 3
    assert sequence.logprobs.logprob < 0


def test_only_host_memory_costs_time_to_copy() -> None:
    case = Case()
    pulled = case.engine.export_blocks([1, 2])
    case.engine.import_blocks(pulled, [3, 4])
    assert case.spent_s == []
    kept = case.engine.export_blocks([1, 2], stand_in_host_memory(*case.engine.exported_shape(2)))
    case.engine.import_blocks(kept, [3, 4])
    assert case.spent_s == [pytest.approx(2 * 16 * 57344 / 25e9)] * 2
    with pytest.raises(InternalError):
        case.engine.import_blocks(pulled, [3])


def test_a_chunk_beyond_its_blocks_is_refused() -> None:
    case = Case()
    sequence = case.sequence(200)
    sequence.block_table = sequence.block_table[:2]
    with pytest.raises(InternalError, match="KV blocks"):
        case.engine.run([Chunk(sequence, 100)])


def test_the_pool_is_what_the_memory_holds() -> None:
    case = Case()
    assert case.engine.block_pool.num_blocks == (8 << 30) // (16 * 57344)
    assert case.engine.model_card.emulation is not None
