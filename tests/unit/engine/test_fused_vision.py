"""The fused vision tower against transformers' modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from triptych.shared.engine import weights
from triptych.shared.engine.fused_vision import FusedVision, can_fuse

_untyped: Any = transformers
GRIDS = {  # frames, height and width, in patches; windows are of 8 x 8
    "full windows": [(1, 16, 32)],
    "several sizes of windows": [(1, 22, 26)],
    "less than a window": [(1, 2, 4)],
    "a strip": [(1, 2, 70)],
    "longer than a tile of the MLP": [(1, 28, 30)],
    "pictures of one size": [(1, 16, 16)] * 3,
    "pictures of several sizes": [(1, 12, 16), (1, 16, 12), (1, 2, 2), (1, 16, 16), (1, 16, 16)],
    "frames": [(1, 6, 8), (3, 10, 12)],
}


def tower(**changed: Any) -> Any:
    """Random weights, norms and biases included."""
    torch.manual_seed(0)
    config = {
        "depth": 4,
        "hidden_size": 96,
        "intermediate_size": 180,  # no power of two
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1, 3],
    }
    vision_config = _untyped.Qwen2_5_VLConfig(vision_config=config | changed).vision_config
    vision_config._attn_implementation = "sdpa"
    model = _untyped.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(vision_config)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name or "ln_q" in name), std=0.1)
    return model


def difference(model: Any, grids: list[tuple[int, int, int]]) -> float:
    """Of embeddings that both make of the same patches, the largest one in relation to their size."""
    patches = torch.randn(sum(frames * height * width for frames, height, width in grids), 3 * 2 * 14 * 14)
    fused = FusedVision(copy.deepcopy(model))
    with torch.inference_mode():
        expected = model(patches, torch.tensor(grids)).pooler_output
        found = fused.forward(patches, grids)
        again = fused.forward(patches, grids)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(again, found)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_the_fused_tower_equals_the_modules(grids: list[tuple[int, int, int]]) -> None:
    assert difference(tower(), grids) < 1e-5


@pytest.mark.parametrize(
    "changed",
    [{"fullatt_block_indexes": []}, {"num_heads": 2}, {"window_size": 56}, {"spatial_merge_size": 1}],
    ids=["windows only", "fewer heads", "small windows", "nothing is merged"],
)
def test_towers_of_other_sizes(changed: dict[str, Any]) -> None:
    assert difference(tower(**changed), GRIDS["pictures of several sizes"]) < 1e-5


def test_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MIN_PACKED", 0)
    assert difference(tower(), GRIDS["several sizes of windows"]) < 1e-5


def test_the_fused_tower_is_as_the_modules_in_bfloat16() -> None:
    assert difference(tower().to(torch.bfloat16), GRIDS["several sizes of windows"]) < 0.05


def test_the_tower_gives_its_blocks_up() -> None:
    """Their weights are not kept twice."""
    model = tower()
    FusedVision(model)
    assert len(model.blocks) == 0


def test_towers_that_are_not_built_so_are_not_fused() -> None:
    assert can_fuse(tower())
    assert not can_fuse(tower(hidden_act="gelu"))
    for part in ("merger", "blocks"):
        other = tower()
        setattr(other, part, torch.nn.ModuleList([torch.nn.Identity()]))
        assert not can_fuse(other)
