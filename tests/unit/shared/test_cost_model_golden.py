"""The cost model beside what is published: sizes exactly, times within the error that stands beside each.

The linear-operator times are of the data that gpus.py was fitted to; DistServe's, Splitwise's and the image times were not
fitted, but for DistServe's cost of a context token at TP 1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.derived import tipping_point_tokens
from triptych.shared.cost_model.forms import PassWork
from triptych.shared.cost_model.gpus import GPUS
from triptych.shared.cost_model.models import MODELS, TextTower
from triptych.shared.cost_model.published import published_cost_model, text_costs

LLAMA_3_8B = TextTower(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_2_70B = TextTower(80, 8192, 28672, 64, 8, 128, 32000)
INTERNLM_20B = TextTower(60, 5120, 13824, 40, 40, 128, 103168)
QWEN_72B = TextTower(80, 8192, 24576, 64, 64, 128, 152064)
OPT_13B = TextTower(40, 5120, 2 * 20480 // 3, 40, 40, 128, 50272)  # its MLP has two matrices of 20480 columns, not three
STEP_OVERHEAD_S = 0.003


@pytest.mark.parametrize(
    ("model", "size", "num_tokens", "num_pieces"),
    [
        ("internvl2.5-26b", (896, 896), 1280, 5),
        ("internvl2.5-26b", (802, 652), 3328, 13),
        ("internvl2.5-26b", (300, 300), 256, 1),
        ("internvl2.5-26b", (3000, 300), 2816, 11),
        ("qwen2.5-vl-7b", (896, 896), 1024, 1),
        ("qwen2.5-vl-7b", (1920, 1080), 69 * 39, 1),
        ("qwen2.5-vl-7b", (1, 1), 4, 1),
        ("llama-3.2-11b", (896, 896), 6404, 1),
        ("llama-3.2-11b", (560, 560), 1601, 1),
        ("llama-3.2-11b", (1120, 500), 3202, 1),
        ("llama-3.2-11b", (2000, 500), 6404, 1),
    ],
)
def test_tokens_of_an_image(model: str, size: tuple[int, int], num_tokens: int, num_pieces: int) -> None:
    shape = published_cost_model("a100", model).image(*size)
    assert (shape.num_tokens, shape.num_pieces) == (num_tokens, num_pieces)


@pytest.mark.parametrize(
    ("model", "architecture", "text_bytes", "image_bytes", "embedding_mb"),
    [
        ("qwen2.5-vl-7b", "DecOnly", 57_344, 0, 7.3),
        ("internvl2.5-26b", "DecOnly", 196_608, 0, 15.7),
        ("llama-3.2-11b", "CroAttn", 131_072, 32_768, 52),
    ],
)
def test_kv_and_embedding_bytes(model: str, architecture: str, text_bytes: int, image_bytes: int, embedding_mb: float) -> None:
    costs = published_cost_model("a100", model)
    assert costs.architecture == architecture
    assert (costs.kv_bytes(1), costs.kv_bytes(0, 1)) == (text_bytes, image_bytes)
    assert costs.embedding_bytes(costs.image(896, 896)) / 1e6 == pytest.approx(embedding_mb, rel=0.01)


@pytest.mark.parametrize(
    ("model", "num_params"), [("qwen2.5-vl-7b", 8.29e9), ("llama-3.2-11b", 10.67e9), ("internvl2.5-26b", 25.5e9)]
)
def test_parameters_are_those_of_the_checkpoints(model: str, num_params: float) -> None:
    assert MODELS[model].weight_bytes / 2 == pytest.approx(num_params, rel=0.01)


@pytest.mark.parametrize(
    ("model", "size", "tflop"),
    [
        ("qwen2.5-vl-7b", (896, 896), 5.5),
        ("qwen2.5-vl-7b", (1920, 1080), 16),
        ("llama-3.2-11b", (896, 896), 18.6),
        ("internvl2.5-26b", (300, 300), 11.9),
        ("internvl2.5-26b", (802, 652), 155),
    ],
)
def test_operations_of_encoding_an_image(model: str, size: tuple[int, int], tflop: float) -> None:
    vision, shape = MODELS[model].vision, MODELS[model].images.shape(*size)
    flops = vision.flops_per_patch * shape.num_patches + vision.flops_per_pair * shape.num_pairs
    assert flops / 1e12 == pytest.approx(tflop, rel=0.03)


@pytest.mark.parametrize(
    ("text", "tp", "published_ms"),  # at 1, 64, 256, 1024 and 4096 tokens
    [
        (LLAMA_3_8B, 1, (9.8, 11.3, 19.6, 75.6, 275)),
        (LLAMA_3_8B, 4, (3.5, 3.7, 7.7, 21.2, 79)),
        (INTERNLM_20B, 4, (8.0, 9.2, 16, 48, 195)),
        (QWEN_72B, 8, (15, 17, 30, 98, 369)),
    ],
)
def test_linear_layers_on_a100(text: TextTower, tp: int, published_ms: tuple[float, ...]) -> None:
    """vidur, within 21 %: cuBLAS picks worse kernels around 256 tokens."""
    alone = replace(GPUS["a100"], all_reduce_s=0.0, all_reduce_bytes_per_s=1e30)
    costs = text_costs(alone, replace(text, vocab_size=0), tp, 0.0)
    got_ms = [costs.pass_s(PassWork(num_tokens)) * 1e3 for num_tokens in (1, 64, 256, 1024, 4096)]
    assert got_ms == pytest.approx(published_ms, rel=0.21)


def _prefill_ms(gpu: str, text: TextTower, tp: int, num_tokens: int) -> float:
    costs = text_costs(GPUS[gpu], text, tp, STEP_OVERHEAD_S)
    return costs.pass_s(PassWork(num_tokens, 1, num_tokens**2 / 2, num_tokens)) * 1e3


@pytest.mark.parametrize(
    ("tp", "fixed_ms", "token_ms", "pair_ms", "error"),
    [(1, 18.1, 0.10191, 7.12e-6, 0.11), (2, 14.7, 0.06858, 2.45e-6, 0.17), (4, 12.1, 0.03808, 5.23e-7, 0.14)],
)
def test_prefill_of_opt_13b(tp: int, fixed_ms: float, token_ms: float, pair_ms: float, error: float) -> None:
    """DistServe's own engine on A100: its fit, read at four lengths."""
    for num_tokens in (256, 512, 1024, 2048):
        published_ms = fixed_ms + token_ms * num_tokens + pair_ms * num_tokens**2
        assert _prefill_ms("a100", OPT_13B, tp, num_tokens) == pytest.approx(published_ms, rel=error)


@pytest.mark.parametrize(
    ("tp", "fixed_ms", "context_ms", "sequence_ms", "error"),
    [(1, 19.93, 6.27e-4, 0.0385, 0.05), (2, 13.29, 3.41e-4, 0.0630, 0.24), (4, 10.26, 1.88e-4, 0.0327, 0.22)],
)
def test_decode_of_opt_13b(tp: int, fixed_ms: float, context_ms: float, sequence_ms: float, error: float) -> None:
    costs = text_costs(GPUS["a100"], OPT_13B, tp, STEP_OVERHEAD_S)
    for batch, context in ((1, 512), (16, 512), (64, 512), (32, 1024), (64, 1024)):
        published_ms = fixed_ms + context_ms * batch * context + sequence_ms * batch
        got_ms = costs.pass_s(PassWork(batch, batch, 0, batch * context)) * 1e3
        assert got_ms == pytest.approx(published_ms, rel=error)


@pytest.mark.parametrize(
    ("gpu", "tp", "num_tokens", "published_ms"),
    [
        ("a100", 4, 512, 127),
        ("a100", 4, 2048, 403),
        ("a100", 8, 512, 93),
        ("a100", 8, 2048, 274),
        ("h100", 4, 2048, 201),
        ("h100", 8, 2048, 137),
    ],
)
def test_prefill_of_llama_2_70b(gpu: str, tp: int, num_tokens: int, published_ms: float) -> None:
    """Splitwise, within 30 %: software of 2023, which ours is faster than; at 8192 tokens by 25 to 56 %."""
    assert _prefill_ms(gpu, LLAMA_2_70B, tp, num_tokens) == pytest.approx(published_ms, rel=0.3)


def test_a_full_hd_image_on_h100() -> None:
    """Measured elsewhere with Qwen2.5-VL-7B: preprocess and encode 167 ms. Its prefill was 126 ms, of which we say 66: some
    engine's overhead that the roofline doesn't have."""
    costs = published_cost_model("h100", "qwen2.5-vl-7b")
    image = costs.image(1920, 1080)
    assert costs.preprocess_s(1920, 1080) + costs.encode_s([image]) == pytest.approx(0.167, rel=0.05)
    assert costs.prefill_s([PrefillChunk(image.num_tokens + 30)]) == pytest.approx(0.066, rel=0.05)


def test_encoding_dominates_the_ttft_of_llama() -> None:
    """ModServe: 79 % on Llama-3.2-11B; we say 68 %, and 84 % without preprocess."""
    costs = published_cost_model("a100", "llama-3.2-11b")
    image = costs.image(896, 896)
    encode_s, preprocess_s = costs.encode_s([image]), costs.preprocess_s(896, 896)
    prefill_s = costs.prefill_s([PrefillChunk(200, num_image_tokens=image.num_tokens)])
    assert encode_s / (encode_s + prefill_s) == pytest.approx(0.84, abs=0.03)
    assert encode_s / (preprocess_s + encode_s + prefill_s) == pytest.approx(0.68, abs=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_tipping_point_on_a100_is_near_the_published(model: str) -> None:
    assert 128 <= tipping_point_tokens(published_cost_model("a100", model)) <= 256


def _fastest_tp(model: str, seconds: str) -> int:
    def time_s(costs: CostModel) -> float:
        image = costs.image(896, 896)
        prompt = PrefillChunk(200, num_image_tokens=image.num_tokens)
        return costs.encode_s([image]) if seconds == "encode" else costs.prefill_s([prompt])

    return min((1, 2, 4, 8), key=lambda tp: time_s(published_cost_model("a100", model, tp)))


def test_tp_serves_prefill_more_than_decode_and_encode() -> None:
    """ModServe: prefill gains up to TP 8; encoders and decode gain little."""
    assert _fastest_tp("llama-3.2-11b", "prefill") == 8
    one, eight = published_cost_model("a100", "llama-3.2-11b"), published_cost_model("a100", "llama-3.2-11b", 8)
    image = one.image(896, 896)
    assert one.encode_s([image]) / eight.encode_s([image]) < 3.5
    assert one.decode_s(DecodeBatch(1, 1000)) / eight.decode_s(DecodeBatch(1, 1000)) < 2


def test_transfers_of_embeddings() -> None:
    """ModServe: P99 of 5 ms over RDMA, P50 of 100 ms over TCP, which some two images of Llama-3.2-11B take."""
    costs = published_cost_model("a100", "llama-3.2-11b")
    num_bytes = 2 * costs.embedding_bytes(costs.image(896, 896))
    assert costs.transfer_s(num_bytes, "rdma") == pytest.approx(0.0047, abs=0.0005)
    assert costs.transfer_s(num_bytes, "tcp") == pytest.approx(0.106, abs=0.005)
    assert costs.transfer_s(num_bytes, "local") < costs.transfer_s(num_bytes, "rdma")
