"""Scenes and pictures: what a scene promises is what Pillow drew, in every size and aspect."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from triptych.loadgen.world import (
    COLORS,
    PLACES,
    SHAPES,
    Scene,
    Shape,
    Spot,
    generator,
    make_scene,
    multi_scenes,
    pick_cells,
    pick_size,
    picture,
    render,
)
from triptych.loadgen.world.colors import MIN_CONTRAST, VALUES, WHITE, contrast

SIZES = [(112, 112), (224, 168), (448, 112), (120, 448)]


def scenes(count: int) -> list[Scene]:
    return [make_scene(generator(77, index)) for index in range(count)]


def boxes(spots: tuple[Spot, ...], image: Image.Image) -> list[tuple[int, int, int, int]]:
    """Left, top, right, bottom in pixels; the last ones are inside."""
    wide, high = image.size
    ends = [(s.x - s.radius_x, s.y - s.radius_y, s.x + s.radius_x, s.y + s.radius_y) for s in spots]
    return [(round(a * wide), round(b * high), round(c * wide), round(d * high)) for a, b, c, d in ends]


def nearest_name(rgb: np.ndarray) -> str:
    return min(VALUES, key=lambda name: min(float(np.linalg.norm(rgb - np.array(value))) for value in VALUES[name]))


def test_a_seed_gives_the_same_picture_and_another_seed_another() -> None:
    def drawn(*seed: int, held_out: bool = False) -> bytes:
        rng = generator(*seed, held_out=held_out)
        return render(make_scene(rng), 112, 112, rng)[0].tobytes()

    assert drawn(5, 6) == drawn(5, 6)
    assert len({drawn(5, 6), drawn(5, 7), drawn(6, 6), drawn(5, 6, held_out=True)}) == 4


def test_training_never_draws_a_held_out_picture() -> None:
    def pictures(held_out: bool) -> set[Scene]:
        return {make_scene(generator(seed, step, held_out=held_out)) for seed in range(2) for step in range(500)}

    training, held_out = pictures(False), pictures(True)
    assert len(training) == len(held_out) == 1000
    assert not training & held_out


def test_every_shape_colour_count_and_place_occurs_about_equally() -> None:
    drawn = scenes(2000)
    shapes = [shape for scene in drawn for shape in scene.shapes]
    for values, names in (([s.kind for s in shapes], SHAPES), ([s.color for s in shapes], COLORS)):
        assert set(values) == set(names)
        for name in names:
            assert values.count(name) / len(values) == pytest.approx(1 / len(names), abs=0.03)
    counts = [len(scene.shapes) for scene in drawn]
    assert [counts.count(count) / len(drawn) for count in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.03)
    places = [shape.place for shape in shapes]
    assert set(places) == {*PLACES, None}
    assert all(places.count(place) / len(places) > 0.04 for place in PLACES)
    assert places.count(None) / len(places) < 0.25


@pytest.mark.parametrize("size", SIZES)
def test_shapes_lie_inside_and_clear_of_each_other(size: tuple[int, int]) -> None:
    rng = generator(1)
    for scene in scenes(150):
        image, spots = render(scene, *size, rng)
        found = boxes(spots, image)
        assert len(found) == len(scene.shapes)
        for left, top, right, bottom in found:
            assert min(left, top) >= 0
            assert right < image.width
            assert bottom < image.height
        for one, other in itertools.combinations(found, 2):
            assert one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]


@pytest.mark.parametrize("size", SIZES)
def test_the_picture_shows_the_scene_and_nothing_else(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the boxes there is background only; inside each there are pixels of the shape's colour, out to its edges."""
    monkeypatch.setattr(picture, "NOISE_SHARE", 0)
    rng = generator(2)
    for scene in scenes(60):
        image, spots = render(scene, *size, rng)
        pixels = np.asarray(image)
        background = pixels[0, 0]
        drawn = (pixels != background).any(2)
        for shape, (left, top, right, bottom) in zip(scene.shapes, boxes(spots, image), strict=True):
            where = (slice(top, bottom + 1), slice(left, right + 1))
            inside = drawn[where].copy()
            drawn[where] = False
            assert 0.6 < np.ptp(np.flatnonzero(inside.any(1))) / (bottom - top) <= 1
            assert 0.6 < np.ptp(np.flatnonzero(inside.any(0))) / (right - left) <= 1
            rgbs = np.unique(pixels[where][inside], axis=0)
            assert len(rgbs) == 1
            assert nearest_name(rgbs[0]) == shape.color
            assert np.linalg.norm(rgbs[0] - background.astype(int)) >= MIN_CONTRAST
        assert not drawn.any()


def test_backgrounds_and_colours_are_often_the_plain_ones() -> None:
    rng = generator(3)
    corners, pure = [], 0
    for scene in scenes(400):
        image, _ = render(scene, 140, 140, rng)
        corners.append(image.getpixel((0, 0)))
        shown = {rgb for _, rgb in image.getcolors(140 * 140) or ()}
        pure += any(VALUES[shape.color][0] in shown for shape in scene.shapes)
    assert 0.4 < corners.count(WHITE) / len(corners) < 0.65
    assert pure > 100


def test_values_of_different_names_are_far_apart() -> None:
    worst = min(
        contrast(one, other)
        for name, another in itertools.combinations(VALUES, 2)
        for one in VALUES[name]
        for other in VALUES[another]
    )
    assert worst > 45
    assert all(contrast(value, WHITE) >= MIN_CONTRAST for values in VALUES.values() for value in values)


@pytest.mark.parametrize(
    ("x", "y", "radius", "place"),
    [
        (0.26, 0.26, 0.2, "top left"),
        (0.7, 0.3, 0.2, "top right"),
        (0.53, 0.46, 0.45, "center"),
        (0.3, 0.8, 0.1, "bottom left"),
        (0.63, 0.62, 0.2, "bottom right"),
        (0.5, 0.2, 0.1, None),  # above the center
        (0.42, 0.42, 0.1, None),  # between corner and center
        (0.35, 0.35, 0.3, None),  # too large for a corner
    ],
)
def test_places_are_named_only_where_nobody_would_argue(x: float, y: float, radius: float, place: str | None) -> None:
    assert Shape("circle", "red", x, y, radius).place == place


def test_reading_order() -> None:
    """Upper rows first and each from the left, wherever rows are told apart; ordered says where they are."""
    ordered = 0
    for scene in [*scenes(500), *(scene for index in range(200) for scene in multi_scenes(generator(8, index)))]:
        if not scene.ordered:
            continue
        ordered += 1
        for first, second in itertools.combinations(scene.shapes, 2):
            same_row = abs(second.y - first.y) < 0.15
            assert first.x < second.x if same_row else first.y < second.y
    assert ordered > 600
    tilted = Scene((Shape("circle", "red", 0.2, 0.4, 0.1), Shape("circle", "red", 0.7, 0.55, 0.1)))
    assert not tilted.ordered


def test_sizes_follow_the_mix() -> None:
    rng = generator(4)
    usual = [pick_cells(rng) for _ in range(4000)]
    assert sum(max(size) > 8 for size in usual) / 4000 == pytest.approx(0.12 * (1 - (5 / 13) ** 2), abs=0.02)
    assert {side for size in usual for side in size} == set(range(4, 17))
    assert {side for _ in range(500) for side in pick_cells(rng, medium=0, large=0)} == {4, 5, 6}
    pixels = [side for _ in range(2000) for side in pick_size(rng)]
    assert min(pixels) == 112
    assert 440 < max(pixels) <= 448
    assert len({side % 28 for side in pixels}) == 28
