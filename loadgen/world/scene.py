"""Scenes: which shapes a picture shows and where, in fractions of the picture, so that one scene fits every size and aspect."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triptych.loadgen.world.colors import COLORS
from triptych.loadgen.world.seeds import pick

SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "center", "bottom left", "bottom right")

GRID_SHARE = 0.7  # chosen: most people's drawings use the corners or the center
# Distances in fractions of a side, chosen so that nobody would argue about a place or about which shape comes first.
_CENTERS = {"top left": (0.26, 0.26), "top right": (0.74, 0.26), "bottom left": (0.26, 0.74), "bottom right": (0.74, 0.74)}
_GRID_JITTER = 0.04
_CENTER_MAX_OFFSET = 0.06
_CORNER_MIN_OFFSET = 0.12
_CORNER_MAX_RADIUS = 0.25
_SAME_ROW = 0.10  # at most this far apart in height: the left one comes first
_OTHER_ROW = 0.20  # at least this far apart: the upper one comes first
_GAP = 0.02  # between shapes, and to the edge
_REPEAT_SHARE = 0.25  # of the shapes have the colour of an earlier one, so that counting is worth asking


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of a scene. x, y: its center in fractions of width and height; radius: half its box, of the shorter side."""

    kind: str
    color: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"

    @property
    def place(self) -> str | None:
        """One of PLACES, or None where people could disagree."""
        right, below = self.x - 0.5, self.y - 0.5
        if max(abs(right), abs(below)) <= _CENTER_MAX_OFFSET:
            return "center"
        if min(abs(right), abs(below)) < _CORNER_MIN_OFFSET or self.radius > _CORNER_MAX_RADIUS:
            return None
        return f"{'bottom' if below > 0 else 'top'} {'right' if right > 0 else 'left'}"


@dataclass(frozen=True, slots=True)
class Scene:
    """The shapes of one picture, in reading order: row by row from the top, each from the left."""

    shapes: tuple[Shape, ...]

    @property
    def ordered(self) -> bool:
        """Whether nobody could read them in another order: every two are clearly in one row or clearly in different ones."""
        heights = sorted(shape.y for shape in self.shapes)
        apart = (lower - upper for upper, lower in itertools.combinations(heights, 2))
        return all(distance <= _SAME_ROW or distance >= _OTHER_ROW for distance in apart)


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    radius: float

    def clear_of(self, other: _Box) -> bool:
        distance = max(abs(self.x - other.x), abs(self.y - other.y))
        return distance >= self.radius + other.radius + _GAP

    @property
    def inside(self) -> bool:
        return all(self.radius + _GAP <= at <= 1 - self.radius - _GAP for at in (self.x, self.y))


def make_scene(rng: np.random.Generator, min_shapes: int = 1, max_shapes: int = 3, colors: Sequence[str] = COLORS) -> Scene:
    """A scene of min_shapes to max_shapes shapes (4 at most); no two overlap, in a picture of any aspect."""
    count = int(rng.integers(min_shapes, max_shapes + 1))
    boxes = _layout(count, rng)
    shapes: list[Shape] = []
    for box in boxes:
        color = pick(shapes, rng).color if shapes and rng.random() < _REPEAT_SHARE else pick(colors, rng)
        shapes.append(Shape(pick(SHAPES, rng), color, box.x, box.y, box.radius))
    return Scene(tuple(_in_reading_order(shapes)))


def multi_scenes(rng: np.random.Generator) -> list[Scene]:
    """Two or three scenes of one or two shapes; half of the time of few colours, so that pictures have something in common."""
    few = [pick(COLORS, rng) for _ in range(3)]
    colors = few if rng.random() < 0.5 else COLORS
    return [make_scene(rng, 1, 2, colors) for _ in range(int(rng.integers(2, 4)))]


def _in_reading_order(shapes: Sequence[Shape]) -> list[Shape]:
    rows: list[list[Shape]] = []
    for shape in sorted(shapes, key=lambda shape: shape.y):
        if not rows or shape.y - rows[-1][0].y > _SAME_ROW:
            rows.append([])
        rows[-1].append(shape)
    return [shape for row in rows for shape in sorted(row, key=lambda shape: shape.x)]


def _layout(count: int, rng: np.random.Generator) -> list[_Box]:
    """Boxes that lie inside the picture and clear of each other; boxes clear in a square picture are so in all wider ones."""
    on_grid = rng.random() < GRID_SHARE
    while True:
        boxes = _grid_boxes(count, rng) if on_grid else _free_boxes(count, rng)
        clear = all(box.clear_of(other) for box, other in itertools.combinations(boxes, 2))
        if clear and all(box.inside for box in boxes):
            return boxes


def _grid_boxes(count: int, rng: np.random.Generator) -> list[_Box]:
    if count == 1 and rng.random() < 0.4:
        centers = [(0.5, 0.5)]
        radii = rng.uniform(0.13, 0.45, 1)
    else:
        corners = list(_CENTERS.values())
        centers = [corners[int(index)] for index in rng.choice(len(corners), count, replace=False)]
        radii = rng.uniform(0.13, 0.22, count)
    jitter = rng.uniform(-_GRID_JITTER, _GRID_JITTER, (count, 2))
    return [_Box(x + dx, y + dy, r) for (x, y), (dx, dy), r in zip(centers, jitter.tolist(), radii.tolist(), strict=True)]


def _free_boxes(count: int, rng: np.random.Generator) -> list[_Box]:
    radii = rng.uniform(0.09, 0.45 if count == 1 else 0.24, count).tolist()
    centers = [rng.uniform(radius + _GAP, 1 - radius - _GAP, 2).tolist() for radius in radii]
    return [_Box(x, y, radius) for (x, y), radius in zip(centers, radii, strict=True)]
