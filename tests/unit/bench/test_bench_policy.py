"""Bench policy's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from triptych.loadgen.bench.policy import FULL, LIGHT, POLICIES, _bars
from triptych.loadgen.bench.policy_replays import (
    BURSTS,
    GPU,
    IMAGE_BURSTS_S,
    MODEL,
    SEEDS,
    Part,
    PolicyBench,
    Scale,
    percentile,
)
from triptych.loadgen.synth.workload import load_workload
from triptych.shared.cost_model.images import TilesAndThumbnail
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.emulation import MAX_POSITION_EMBEDDINGS


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentile(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_the_bursts_are_those_of_the_workload() -> None:
    [image] = [client for client in load_workload("bursts").client if client.images]
    assert tuple((burst.start_s, burst.start_s + burst.duration_s) for burst in image.burst) == IMAGE_BURSTS_S


def test_bars_compare_each_set_with_the_one_below() -> None:
    figures = {f"bursts_goodput_own_scaled_per_s.{policy}": float(place + 1) for place, policy in enumerate(POLICIES)}
    figures |= {f"bursts_text_p99_ttft_in_bursts_s.{policy}": 4.0 / (place + 1) for place, policy in enumerate(POLICIES)}
    figures |= {f"image-light_goodput_own_scaled_per_s.{policy}": 0.97 if policy == "triptych" else 1.0 for policy in POLICIES}
    bars = _bars(figures)
    assert {name for name, bar in bars.items() if not bar.holds} == {"image_light_triptych_to_monolith"}
    assert bars["goodput_triptych_to_modserve"].value == pytest.approx(4 / 3)
    assert bars["text_p99_in_bursts_triptych_to_monolith"].value == 0.25


def test_a_checkpoint_makes_a_smaller_run_on_a_real_engine() -> None:
    real = FULL.on(Path("checkpoint"))
    assert (real.parts, real.engine.model, real.engine.gpu) == (FULL.torch_parts, "checkpoint", None)
    assert (real.time_scale, real.seeds, real.policies) == (1.0, SEEDS[:1], POLICIES)
    assert FULL.on(None) == FULL


def test_an_abridged_workload_has_the_same_shape_in_less_time(tmp_path: Path) -> None:
    parts = {"whole": Part(2.0, 180.0), "abridged": Part(2.0, 18.0, abridged=10.0)}
    times_s = {}
    for name, part in parts.items():
        bench = PolicyBench(Scale({BURSTS: part}, 1.0, (1,), POLICIES), tmp_path)
        times_s[name] = [row.arrival_s for row in bench._trace(BURSTS, 1).rows]
    assert len(times_s["abridged"]) == pytest.approx(len(times_s["whole"]) / 10, rel=0.15)
    assert max(times_s["abridged"]) < 18.0
    shares = {name: share_in_bursts([at_s * parts[name].abridged for at_s in at]) for name, at in times_s.items()}
    assert shares["abridged"] == pytest.approx(shares["whole"], abs=0.07)


def share_in_bursts(times_s: Sequence[float]) -> float:
    return sum(any(begin_s <= at_s < end_s for begin_s, end_s in IMAGE_BURSTS_S) for at_s in times_s) / len(times_s)


@pytest.mark.parametrize("workload", [BURSTS, LIGHT])
def test_what_is_sent_fits_in_the_models_context(workload: str, tmp_path: Path) -> None:
    """Whatever the drawings are like: tiles depend on their ratio."""
    images = published_cost_model(GPU, MODEL, 1).images
    assert isinstance(images, TilesAndThumbnail)
    bench = PolicyBench(Scale({workload: FULL.parts[workload]}, 1.0, SEEDS, POLICIES), tmp_path)
    for row in (row for seed in SEEDS for row in bench._trace(workload, seed).rows):
        num_text_tokens = row.num_context_tokens - (row.num_image_tokens or 0)
        num_image_tokens = row.num_images * (images.max_tiles + 1) * images.tokens_per_tile
        assert num_text_tokens + num_image_tokens + row.num_output_tokens < 0.95 * MAX_POSITION_EMBEDDINGS[MODEL]
