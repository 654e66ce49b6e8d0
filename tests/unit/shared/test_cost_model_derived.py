"""Batch sizes, capacity and TP on examples that are computed by hand, and on the published models' orderings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.derived import (
    NO_CAPACITY,
    Capacity,
    Slo,
    TypicalRequest,
    choose_tp,
    image_capacity,
    isolated_slo,
    max_decode_batch,
    max_encode_batch,
    max_prefill_tokens,
    prompt_of,
    text_capacity,
    tipping_point_tokens,
)
from triptych.shared.cost_model.forms import MemoryCosts, PassCosts, PreprocessCosts
from triptych.shared.cost_model.images import TilesAndThumbnail
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.cost_model.unknowns import Unknowns

PICTURE = TypicalRequest(num_text_tokens=75, num_output_tokens=10, num_images=1, image_width=100, image_height=100)


def model_by_hand() -> CostModel:
    """One picture: 25 tokens, 100 patches, 10 ms to preprocess. Encoding n of them: 10 + 50 n ms. A prefill step of n tokens:
    10 + n ms; a decode step of n sequences: 5 + n ms. Room for the KV of 1000 tokens."""
    return CostModel(
        name="by hand",
        source="published",
        architecture="DecOnly",
        tp=1,
        images=TilesAndThumbnail(tile_side=10, max_tiles=1, patches_per_tile=100, tokens_per_tile=25),
        preprocess=PreprocessCosts(0.0, 1e-6),
        encode=PassCosts(fixed_s=0.010, token_s=0.0005),
        prefill=PassCosts(fixed_s=0.010, token_s=0.001, knee_tokens=0.0),
        decode=PassCosts(fixed_s=0.005, token_s=0.001),
        memory=MemoryCosts(10**9, 100, 0, 100, 100_000),
        unknowns=Unknowns(),
    )


def test_the_largest_batches_within_a_budget() -> None:
    model = model_by_hand()
    image, prompt = model.image(100, 100), prompt_of(model, PICTURE)
    assert prompt == PrefillChunk(100)
    assert [max_encode_batch(model, image, budget_s) for budget_s in (0.059, 0.0601, 0.1099, 0.5601)] == [0, 1, 1, 11]
    assert [max_prefill_tokens(model, budget_s) for budget_s in (0.0109, 0.0111, 0.5101)] == [0, 1, 500]
    assert [max_decode_batch(model, prompt, tbt_s) for tbt_s in (0.0059, 0.0081, 10.0)] == [0, 3, 10]  # 10: the KV memory


def test_the_slo_is_a_multiple_of_the_isolated_latency() -> None:
    """Alone: 10 ms preprocess, 60 encode, 110 prefill; 6 a token."""
    slo = isolated_slo(model_by_hand(), PICTURE, factor=5)
    assert (slo.ttft_s, slo.tbt_s) == (pytest.approx(0.9), pytest.approx(0.03))


def test_capacity_of_an_image_instance() -> None:
    """900 ms - 10 preprocess - 110 prefill leave 780: two batches of 390 ms, 7 pictures each (10 + 350 = 360 ms)."""
    capacity = image_capacity(model_by_hand(), PICTURE, Slo(ttft_s=0.9, tbt_s=0.03))
    assert capacity.batch == 7
    assert capacity.tokens_per_s == pytest.approx(7 * 25 / 0.36)
    assert image_capacity(model_by_hand(), PICTURE, Slo(ttft_s=0.2, tbt_s=0.03)) == NO_CAPACITY
    assert image_capacity(model_by_hand(), replace(PICTURE, num_images=0), Slo(1.0, 1.0)) == NO_CAPACITY


def test_capacity_of_a_text_instance() -> None:
    """A prompt of 100 tokens for 10 of output: 10 prompt tokens a step for each sequence. A step of batch n computes 11 n
    tokens in 10 + 11 n ms; its limit of 100 ms lets 8 in. A prompt takes 100 / 80 steps and waits for one: 2.25 x 98 ms."""
    slo = Slo(ttft_s=0.07 + 2.25 * 0.098 + 1e-6, tbt_s=0.1)
    capacity = text_capacity(model_by_hand(), PICTURE, slo)
    assert capacity.batch == 8
    assert capacity.tokens_per_s == pytest.approx(8 * 11 / 0.098)
    tighter = replace(slo, tbt_s=0.09)  # 7: 87 ms, and 100 / 70 + 1 steps are 211 ms
    assert text_capacity(model_by_hand(), PICTURE, tighter).batch == 7
    assert text_capacity(model_by_hand(), PICTURE, replace(slo, ttft_s=0.2)) == NO_CAPACITY
    roomy = Slo(ttft_s=100, tbt_s=100)
    assert text_capacity(model_by_hand(), PICTURE, roomy).batch == 10  # the KV memory


def test_text_of_a_cross_attention_model_is_counted_without_images() -> None:
    model = published_cost_model("a100", "llama-3.2-11b")
    prompt = prompt_of(model, TypicalRequest(75, 10, 2, 896, 896))
    assert prompt == PrefillChunk(75, 0, 2 * 6404)
    assert (
        prompt_of(published_cost_model("a100", "internvl2.5-26b"), TypicalRequest(75, 10, 2, 896, 896)).num_tokens == 75 + 2560
    )


def test_the_tp_with_most_throughput_per_gpu_is_chosen() -> None:
    models = [replace(model_by_hand(), tp=tp) for tp in (1, 2, 4)]
    rates = {1: 100.0, 2: 300.0, 4: 400.0}
    chosen = choose_tp(models, lambda model: Capacity(1, rates[model.tp]))
    assert chosen is not None
    assert chosen.tp == 2
    equal = choose_tp(models, lambda model: Capacity(1, 10.0 * model.tp))
    assert equal is not None
    assert equal.tp == 1
    assert choose_tp(models, lambda model: NO_CAPACITY) is None
    assert choose_tp([], lambda model: Capacity(1, 1.0)) is None


def test_a_tight_slo_needs_more_gpus_than_a_loose_one() -> None:
    """ModServe's choice of TP: at twice the isolated latency of TP 1 one GPU is enough, below it is not."""
    models = [published_cost_model("a100", "internvl2.5-26b", tp) for tp in (1, 2, 4, 8)]
    request = TypicalRequest(200, 100, 1, 896, 896)
    chosen = []
    for factor in (0.7, 2.5, 10):
        slo = isolated_slo(models[0], request, factor)
        best = choose_tp(models, lambda model, slo=slo: image_capacity(model, request, slo))  # type: ignore[misc]
        chosen.append(best.tp if best else None)
    assert chosen[0] in (2, 4, 8)
    assert chosen[1:] == [1, 1]


@given(
    st.sampled_from(["qwen2.5-vl-7b", "llama-3.2-11b", "internvl2.5-26b"]),
    st.integers(1, 8),
    st.floats(1.2, 20),
    st.floats(1.01, 4),
)
def test_a_looser_slo_never_lowers_the_capacity(model: str, num_images: int, factor: float, looser: float) -> None:
    costs = published_cost_model("a100", model, 4)
    request = TypicalRequest(200, 100, num_images, 600, 500)
    tight, loose = (isolated_slo(costs, request, f) for f in (factor, factor * looser))
    for capacity in (image_capacity, text_capacity):
        assert capacity(costs, request, tight).tokens_per_s <= capacity(costs, request, loose).tokens_per_s * (1 + 1e-9)


@given(st.floats(0.001, 10), st.integers(1, 4000))
def test_no_larger_batch_fits(budget_s: float, num_tokens: int) -> None:
    model = published_cost_model("h100", "llama-3.2-11b")
    image, prompt = model.image(700, 500), PrefillChunk(num_tokens)
    batch = max_encode_batch(model, image, budget_s)
    assert batch == 0 or model.encode_s([image] * batch) <= budget_s
    assert model.encode_s([image] * (batch + 1)) > budget_s
    batch = max_decode_batch(model, prompt, budget_s)
    if 0 < batch < 4096 and (batch + 1) * model.kv_bytes(num_tokens) <= model.memory.kv_capacity_bytes:
        assert model.decode_s(DecodeBatch(batch + 1, (batch + 1) * num_tokens)) > budget_s


def test_the_tipping_point_is_the_knee() -> None:
    model = replace(model_by_hand(), prefill=PassCosts(0.0, 0.001, knee_tokens=150.0))
    assert tipping_point_tokens(model) == 150
