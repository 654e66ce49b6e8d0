"""Properties that every cost model has, published or measured, and what a published one refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PassWork, PreprocessCosts
from triptych.shared.cost_model.gpus import GPUS
from triptych.shared.cost_model.images import TilesAndThumbnail
from triptych.shared.cost_model.models import MODELS
from triptych.shared.cost_model.published import derived_cost_model, published_cost_model
from triptych.shared.cost_model.unknowns import Unknowns
from triptych.shared.errors import BadRequest

NO_DECODE = DecodeBatch(0, 0)
ALL = [published_cost_model(gpu, model, tp) for gpu in GPUS for model in MODELS for tp in (1, 2, 4)]
cost_models = st.sampled_from(ALL)
sides = st.integers(1, 4000)
counts = st.integers(1, 64)
tokens = st.integers(0, 20_000)


def simple_model(**changes: object) -> CostModel:
    """Costs with round numbers, for examples by hand: 10 ms a pass and 1 ms a token, everywhere."""
    step = PassCosts(fixed_s=0.010, token_s=0.001)
    model = CostModel(
        name="by hand",
        source="published",
        architecture="DecOnly",
        tp=1,
        images=TilesAndThumbnail(tile_side=10, max_tiles=1, patches_per_tile=100, tokens_per_tile=25),
        preprocess=PreprocessCosts(0.0, 1e-6),
        encode=step,
        prefill=step,
        decode=step,
        memory=MemoryCosts(10**9, 1000, 0, 100, 10**9),
        unknowns=Unknowns(),
    )
    return replace(model, **changes)  # type: ignore[arg-type]


@given(cost_models, counts, counts, tokens)
def test_more_work_never_takes_less_time(model: CostModel, few: int, more: int, context: int) -> None:
    many = few + more
    image = model.image(700, 500)
    assert 0 < model.encode_s([image] * few) < model.encode_s([image] * many)
    assert 0 < model.decode_s(DecodeBatch(few, context)) < model.decode_s(DecodeBatch(many, context))
    assert model.decode_s(DecodeBatch(few, context)) < model.decode_s(DecodeBatch(few, context + more))
    for chunk in (PrefillChunk(few, context), PrefillChunk(many, context), PrefillChunk(few, context + more)):
        assert model.prefill_s([PrefillChunk(few, context)]) <= model.prefill_s([chunk])


@given(cost_models, counts, counts)
def test_batching_is_never_slower_than_taking_turns(model: CostModel, a: int, b: int) -> None:
    image = model.image(500, 500)
    assert model.encode_s([image] * (a + b)) <= model.encode_s([image] * a) + model.encode_s([image] * b)
    together, apart = DecodeBatch(a + b, 100 * (a + b)), (DecodeBatch(a, 100 * a), DecodeBatch(b, 100 * b))
    assert model.decode_s(together) <= sum(map(model.decode_s, apart))


@given(cost_models, st.integers(2, 4000), st.integers(1, 10))
def test_cutting_a_prompt_costs_time_but_no_less_work(model: CostModel, num_tokens: int, num_cuts: int) -> None:
    cuts = sorted({0, num_tokens, *(num_tokens * i // num_cuts for i in range(num_cuts))})
    chunks = [PrefillChunk(end - begin, begin) for begin, end in pairwise(cuts)]
    assert sum(model.prefill_s([chunk]) for chunk in chunks) >= model.prefill_s([PrefillChunk(num_tokens)]) * (1 - 1e-9)


@given(cost_models, counts, counts, tokens)
def test_a_mixed_step_is_between_its_parts_and_their_sum(model: CostModel, prompt: int, batch: int, context: int) -> None:
    chunks, decode = [PrefillChunk(prompt)], DecodeBatch(batch, batch * context)
    alone = (model.prefill_s(chunks), model.decode_s(decode))
    assert max(alone) <= model.mixed_s(chunks, decode) * (1 + 1e-9)
    assert model.mixed_s(chunks, decode) <= sum(alone)
    assert model.mixed_s(chunks, NO_DECODE) == pytest.approx(alone[0])
    assert model.mixed_s([], decode) == alone[1]


@given(cost_models, sides, sides)
def test_every_picture_has_a_shape(model: CostModel, width: int, height: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    shape = model.image(width, height)
    assert shape.num_tokens >= 1
    assert shape.num_patches == shape.num_pieces * shape.patches_per_piece >= shape.num_tokens
    if not isinstance(model.images, TilesAndThumbnail):  # it compares width / height: 1:3 and 1:4 are nearer than 3:1 and 4:1
        turned = model.image(height, width)
        assert (turned.num_tokens, turned.patches_per_piece) == (shape.num_tokens, shape.patches_per_piece)


@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(GPUS)))
def test_more_gpus_are_faster_but_never_more_than_in_proportion(model: str, gpu: str) -> None:
    one, two = published_cost_model(gpu, model), published_cost_model(gpu, model, 2)
    image, chunk = one.image(900, 700), PrefillChunk(2000)
    for few, more in (
        (one.encode_s([image]), two.encode_s([image])),
        (one.prefill_s([chunk]), two.prefill_s([chunk])),
        (one.decode_s(DecodeBatch(64, 64_000)), two.decode_s(DecodeBatch(64, 64_000))),
    ):
        assert few / 2 < more < few


def test_nothing_to_do_takes_no_time() -> None:
    for model in ALL:
        assert model.encode_s([]) == model.prefill_s([]) == model.decode_s(NO_DECODE) == model.mixed_s([], NO_DECODE) == 0


def test_the_knee_is_where_weights_and_computing_take_equally_long() -> None:
    costs = PassCosts(fixed_s=0.0, token_s=0.002, knee_tokens=100)
    assert costs.pass_s(PassWork(1)) == pytest.approx(0.2, rel=1e-3)
    assert costs.pass_s(PassWork(100)) == pytest.approx(0.2 * math.sqrt(2))
    assert costs.pass_s(PassWork(10_000)) == pytest.approx(20, rel=1e-3)


def test_each_cost_counts_what_it_says() -> None:
    costs = PassCosts(fixed_s=1, token_s=10, sequence_s=100, pair_s=1000, context_s=10_000)
    assert costs.pass_s(PassWork(2, 3, 4, 5)) == 1 + 20 + 300 + 4000 + 50_000
    model = simple_model(prefill=PassCosts(0, 0, 0, 0, pair_s=1.0), decode=PassCosts(0, 0, 0, 0, 0, context_s=1.0))
    assert model.prefill_s([PrefillChunk(10)]) == 50  # causal: half of 10 x 10
    assert model.prefill_s([PrefillChunk(10, 100)]) == 1050
    assert model.decode_s(DecodeBatch(2, 300)) == 300


def test_cross_attention_counts_image_tokens_by_their_layers() -> None:
    """An image token is in 8 layers, a text token in the 32 others: a quarter of the pairs, and of the KV."""
    model = published_cost_model("a100", "llama-3.2-11b")
    text, images = DecodeBatch(1, 1601), DecodeBatch(1, 0, 4 * 1601)
    assert model.decode_s(text) == pytest.approx(model.decode_s(images))
    first, later = PrefillChunk(100, 0, 6404), PrefillChunk(100, 1, 6404)
    image_kv_s = model.prefill_s([first]) - model.prefill_s([later])
    assert 0.001 < image_kv_s < 0.01  # about 50 text tokens' worth, once per request
    assert model.prefill_s([first]) < model.prefill_s([PrefillChunk(100 + 6404)]) / 5


def test_colocated_stages_slow_each_other_down() -> None:
    unknowns = Unknowns(compute_beside_compute=2.0, compute_beside_decode=1.25, decode_beside_compute=1.5)
    model = simple_model(unknowns=unknowns)
    assert model.colocated_s(1.0, "encode", []) == 1.0
    assert model.colocated_s(1.0, "encode", ["prefill"]) == 2.0
    assert model.colocated_s(1.0, "prefill", ["encode", "decode"]) == 2.5
    assert model.colocated_s(1.0, "decode", ["prefill"]) == 1.5


def test_preprocess_transfer_and_start_up() -> None:
    model = simple_model(unknowns=Unknowns(process_start_s=5.0, weights_bytes_per_s=1e9, role_switch_s=0.25))
    assert model.preprocess_s(1000, 500) == pytest.approx(0.5)
    assert model.transfer_s(10**9, "tcp") == pytest.approx(1.001)
    assert (model.startup_s, model.role_switch_s) == (6.0, 0.25)
    assert replace(model, tp=2).startup_s == 5.5  # each GPU reads its part


@pytest.mark.parametrize(
    ("gpu", "model", "tp", "said"),
    [
        ("b200", "llama-3.2-11b", 1, "a100, a800, h100"),
        ("a100", "gpt-9", 1, "qwen2.5-vl-7b, llama-3.2-11b, internvl2.5-26b"),
        ("a100", "qwen2.5-vl-7b", 8, "cannot run at TP 8"),  # 28 heads
        ("a100", "llama-3.2-11b", 3, "cannot run at TP 3"),
    ],
)
def test_what_there_is_no_model_of_is_refused(gpu: str, model: str, tp: int, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        published_cost_model(gpu, model, tp)


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = replace(GPUS["a100"], memory_bytes=40 << 30)
    with pytest.raises(BadRequest, match="does not fit on 1 x A100-80G"):
        derived_cost_model(small, MODELS["internvl2.5-26b"], 1, Unknowns())
    assert derived_cost_model(small, MODELS["internvl2.5-26b"], 2, Unknowns()).memory.kv_capacity_bytes > 0
