"""Checkpoint: image sizes as transformers computes them, names, revisions, and refusals that say what is wrong."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from support.bare_checkpoint import PROCESSOR, write_bare_checkpoint, write_weights
from triptych.shared.checkpoint import ImageOptions, grid_thw, num_image_tokens, open_checkpoint, resized
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import PixelLimits

OPTIONS = ImageOptions(14, 2, 2, 56 * 56, 448 * 448, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
MANY = [
    OPTIONS,
    replace(OPTIONS, max_pixels=14 * 14 * 4 * 1280),
    replace(OPTIONS, patch_size=16, min_pixels=65536, max_pixels=16777216),
    replace(OPTIONS, min_pixels=256 * 28 * 28, max_pixels=257 * 28 * 28),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bare_checkpoint(tmp_path / "my-model")


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MANY)
def test_sizes_are_those_of_transformers(options: ImageOptions) -> None:
    rng = random.Random(0)
    factor = options.patch_size * options.merge_size
    halves = [(factor * a + factor // 2, factor * b + factor // 2) for a in range(1, 12) for b in range(1, 12)]
    sizes = halves + [(rng.randint(1, 3000), rng.randint(1, 3000)) for _ in range(3000)]
    sizes += [(side, side * 200) for side in (1, 3, 13, 14, 27, 28)] + [(1, 1), (1, 2), (2, 2), (27, 28), (28, 28)]
    num_compared = 0
    for height, width in sizes:
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, factor, options.min_pixels, options.max_pixels)
            assert resized(height, width, options) == expected, (height, width)
            num_compared += 1
    assert num_compared > 2900


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (PixelLimits(), (3136, 200_704)),
        (PixelLimits(1, 10**12), (3136, 200_704)),
        (PixelLimits(50_000, 60_000), (50_000, 60_000)),
        (PixelLimits(None, 1), (3136, 3136)),
        (PixelLimits(10**12), (200_704, 200_704)),
        (PixelLimits(60_000, 50_000), (50_000, 50_000)),
    ],
)
def test_limits_of_a_client_stay_within_those_of_the_model(limits: PixelLimits, expected: tuple[int, int]) -> None:
    within = OPTIONS.within(limits)
    assert (within.min_pixels, within.max_pixels) == expected
    assert (within.key() == OPTIONS.key()) == (within == OPTIONS)


def test_halves_round_to_even() -> None:
    """Python's round() and so transformers': 42 / 28 = 1.5 becomes 2, 70 / 28 = 2.5 becomes 2 too."""
    wide = replace(OPTIONS, min_pixels=1)
    assert resized(42, 70, wide) == (56, 56)
    assert resized(98, 126, wide) == (112, 112)


@pytest.mark.parametrize(("height", "width"), [(1, 201), (201, 1), (5, 1093), (13, 2601)])
def test_too_thin_is_refused_where_transformers_does(height: int, width: int) -> None:
    with pytest.raises(ValueError, match="aspect ratio"):
        smart_resize(height, width)
    with pytest.raises(BadRequest) as caught:
        resized(height, width, OPTIONS)
    assert caught.value.code == "invalid_image"


def test_every_picture_has_tokens_and_none_is_over_the_bound() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        side = rng.randint(1, 4000)
        other = min(side * 200, rng.randint(side, 200 * side))
        height, width = resized(side, other, OPTIONS)
        grid = grid_thw(height, width, OPTIONS)
        assert height % 28 == width % 28 == 0
        assert height * width <= OPTIONS.max_pixels
        assert num_image_tokens(grid, OPTIONS) == height * width // 28**2 >= 1


# --- opening --------------------------------------------------------------------------------------------------------------


def test_opens_a_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "my-model"
    assert checkpoint.path == folder.resolve()
    assert checkpoint.model_type == "qwen2_5_vl"
    assert checkpoint.image == replace(OPTIONS, max_pixels=200704)
    assert checkpoint.max_position_embeddings == 512
    assert checkpoint.eos_token_ids == (2,)
    assert not checkpoint.random_weights


def test_name_is_given_or_the_last_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_checkpoint(str(folder), "given").name == "given"
    assert open_checkpoint(f"{folder}/").name == "my-model"
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").name == "my-model"
    link = folder.parent / "current"
    link.symlink_to(folder)
    assert open_checkpoint(str(link)).name == "current"


def test_processor_config_of_newer_transformers(folder: Path) -> None:
    """Nested, sizes in `size`, and preferred to the older file, as transformers does."""
    nested = {key: value for key, value in PROCESSOR.items() if not key.endswith("_pixels")}
    nested |= {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 4096}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    image = open_checkpoint(str(folder)).image
    assert (image.patch_size, image.min_pixels, image.max_pixels) == (16, 1024, 4096)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    assert open_checkpoint(str(folder)).image.patch_size == 14


def test_revision_is_equal_for_equal_files_only(folder: Path, tmp_path: Path) -> None:
    first = open_checkpoint(str(folder)).revision
    assert open_checkpoint(str(folder)).revision == first
    write_weights(folder / "model.safetensors", [bytes(10_000), b"\1" + bytes(9_999)])
    trained_further = open_checkpoint(str(folder)).revision
    _change(folder / "config.json", rope_theta=1)
    assert len({first, trained_further, open_checkpoint(str(folder)).revision}) == 3


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"w": {}}', b'{"w": 3}', b'{"w": {"data_offsets": []}}'])
def test_broken_weights_are_refused(folder: Path, header: bytes) -> None:
    write_weights(folder / "model.safetensors", [], header)
    with pytest.raises(BadRequest) as caught:
        open_checkpoint(str(folder))
    assert caught.value.code == "unsupported_model"


def test_what_is_no_safetensors_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(BadRequest, match="not a safetensors file"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("missing", ["config.json", "preprocessor_config.json"])
def test_missing_files_are_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(BadRequest, match=missing):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"text_config": {}}),
        ("config.json", {"image_token_id": "x"}),
        ("preprocessor_config.json", {"image_mean": [0.5]}),
        ("preprocessor_config.json", {"image_std": 0.5}),
        ("preprocessor_config.json", {"min_pixels": None}),
    ],
)
def test_configurations_that_lack_something_are_refused(folder: Path, file: str, changes: dict[str, object]) -> None:
    _change(folder / file, **changes)
    with pytest.raises(BadRequest) as caught:
        open_checkpoint(str(folder))
    assert caught.value.code == "unsupported_model"


def test_no_model_and_unknown_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="TRIPTYCH_MODEL"):
        open_checkpoint("")
    with pytest.raises(BadRequest) as caught:
        open_checkpoint(str(tmp_path / "nothing here"))
    assert caught.value.code == "model_not_found"
