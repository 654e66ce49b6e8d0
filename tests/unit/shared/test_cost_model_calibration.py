"""What gpus.py says of its fits, computed again from the timings that it was fitted to, where these are at hand."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from triptych.shared.cost_model.forms import PassWork
from triptych.shared.cost_model.gpus import GPUS, Gpu
from triptych.shared.cost_model.models import TextTower
from triptych.shared.cost_model.published import text_costs

TIMINGS = Path(__file__).parents[4] / "shared" / "calibration" / "vidur"
NUM_LAYERS = {"Llama-2-7b-hf": 32, "Meta-Llama-3-70B": 80, "Meta-Llama-3-8B": 32, "Qwen-72B": 80, "internlm-20b": 60}
LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
OTHERS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
MAX_TOKENS = 16_384
LARGE_BYTES = 16 << 20  # KV and embeddings of a request are larger

pytestmark = pytest.mark.skipif(not TIMINGS.exists(), reason="the published timings are not part of the project")


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def errors_of(pairs: dict[object, tuple[float, float]]) -> tuple[int, float, float]:
    """Number, median and 95 % of |log(said / measured)|."""
    errors = [abs(math.log(said / measured)) for said, measured in pairs.values()]
    return len(errors), float(np.median(errors)), float(np.quantile(errors, 0.95))


def layers(gpu: str) -> dict[object, tuple[float, float]]:
    """By model, TP and tokens: seconds of all layers without attention and all-reduce, as said and as measured."""
    alone = replace(GPUS[gpu], all_reduce_s=0.0, all_reduce_bytes_per_s=math.inf)
    pairs: dict[object, tuple[float, float]] = {}
    for path in TIMINGS.glob(f"{gpu}_*_mlp.csv.gz"):
        model = path.name.removeprefix(f"{gpu}_").removesuffix("_mlp.csv.gz")
        for row in rows_of(path):
            num_tokens, tp = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            heads, kv_heads, hidden, wide = (int(row[key]) for key in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd"))
            text = TextTower(NUM_LAYERS[model], hidden, wide, heads, kv_heads, hidden // heads, vocab_size=0)
            said_s = text_costs(alone, text, tp, 0.0).pass_s(PassWork(num_tokens))
            layer_ms = sum(float(row[f"time_stats.{name}.median"] or 0) for name in (*LINEAR, *OTHERS))
            if num_tokens <= MAX_TOKENS:
                pairs[model, tp, num_tokens] = (said_s, text.num_layers * layer_ms / 1e3)
    return pairs


def transfers(gpu: str, what: str) -> dict[object, tuple[float, float]]:
    """By GPUs and bytes, inside a node."""
    pairs: dict[object, tuple[float, float]] = {}
    for row in rows_of(TIMINGS / f"{gpu}_dgx_{what}.csv.gz"):
        num_gpus, num_bytes = int(row["num_workers"]), int(row["size"])
        if row["devices_per_node"] == row["num_workers"]:
            said_s = _transfer_s(GPUS[gpu], what, num_gpus, num_bytes)
            pairs[num_gpus, num_bytes, row["rank"]] = (said_s, float(row[f"time_stats.{what}.median"]) / 1e3)
    return pairs


def _transfer_s(gpu: Gpu, what: str, num_gpus: int, num_bytes: int) -> float:
    if what == "send_recv":
        return num_bytes / gpu.local_bytes_per_s
    return gpu.all_reduce_s + 2 * (num_gpus - 1) / num_gpus * num_bytes / gpu.all_reduce_bytes_per_s


@pytest.mark.parametrize(
    ("gpu", "num_points", "median", "p95", "median_of_all", "p95_of_all"),
    [("a100", 276, 0.037, 0.13, 0.047, 0.18), ("h100", 156, 0.038, 0.17, 0.073, 0.28)],
)
def test_layers(gpu: str, num_points: int, median: float, p95: float, median_of_all: float, p95_of_all: float) -> None:
    pairs = layers(gpu)
    powers = {key: pair for key, pair in pairs.items() if (tokens := int(key[2])) & (tokens - 1) == 0}  # type: ignore[index]
    assert errors_of(powers) == (num_points, pytest.approx(median, abs=0.003), pytest.approx(p95, abs=0.01))
    assert errors_of(pairs)[1:] == (pytest.approx(median_of_all, abs=0.003), pytest.approx(p95_of_all, abs=0.01))


@pytest.mark.parametrize(
    ("gpu", "what", "median", "p95"),
    [
        ("a100", "all_reduce", 0.06, 0.31),
        ("h100", "all_reduce", 0.07, 0.31),
        ("a100", "send_recv", 0.02, 0.18),
        ("h100", "send_recv", 0.015, 0.07),
    ],
)
def test_transfers(gpu: str, what: str, median: float, p95: float) -> None:
    pairs = transfers(gpu, what)
    if what == "send_recv":
        pairs = {key: pair for key, pair in pairs.items() if int(key[1]) >= LARGE_BYTES}  # type: ignore[index]
    assert errors_of(pairs)[1:] == (pytest.approx(median, abs=0.01), pytest.approx(p95, abs=0.02))
