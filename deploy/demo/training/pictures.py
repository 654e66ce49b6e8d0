"""Pictures as the vision tower takes them, and what each of their cells should be told to show.

Pixels are what transformers' image processor makes (a test compares), but as bytes and one frame instead of two equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.recipe import ModelShape
from triptych.loadgen.checkpoint import PROCESSOR
from triptych.loadgen.world import CELL_PX, COLORS, PLACES, SHAPES, Scene, Spot, pick_size, render
from triptych.shared.checkpoint import ImageOptions, resized

Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_MAX_SHAPES = 3  # of a scene
# What a cell is asked, and how many answers there are. 0: no shape there; the place of a shape may be nobody's to say.
# The last three speak about the whole picture, so that counting is a look at one cell.
CELL_LABELS = {
    "kind": len(SHAPES) + 1,
    "color": len(COLORS) + 1,
    "place": len(PLACES) + 2,
    "number": _MAX_SHAPES + 1,  # in reading order
    "num_shapes": _MAX_SHAPES + 1,
    "num_same_color": _MAX_SHAPES + 1,
    "num_same_kind": _MAX_SHAPES + 1,
}
_COVERED_SHARE = 0.85  # of a shape's box: a cell whose center lies there shows it; chosen


def processor_config(shape: ModelShape) -> dict[str, Any]:
    """preprocessor_config.json."""
    return {**PROCESSOR, "min_pixels": shape.min_pixels, "max_pixels": shape.max_pixels}


def image_options(shape: ModelShape) -> ImageOptions:
    names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    fixed: dict[str, Any] = {name: PROCESSOR[name] for name in names}
    return ImageOptions(**fixed, min_pixels=shape.min_pixels, max_pixels=shape.max_pixels)


@dataclass(frozen=True, slots=True)
class Picture:
    """pixels [patches, RGB x patch]: cell by cell, 2 x 2 patches each; labels [cells, CELL_LABELS]."""

    columns: int
    rows: int
    pixels: Bytes
    labels: Integers


def draw(scene: Scene, options: ImageOptions, rng: np.random.Generator) -> Picture:
    image, spots = render(scene, *pick_size(rng), rng)
    pixels = patches(image, options)
    height, width = resized(image.height, image.width, options)
    columns, rows = width // CELL_PX, height // CELL_PX
    return Picture(columns, rows, pixels, _cell_labels(scene, spots, columns, rows))


def patches(image: Image.Image, options: ImageOptions) -> Bytes:
    height, width = resized(image.height, image.width, options)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    size, merge = options.patch_size, options.merge_size
    split = np.asarray(image).reshape(height // CELL_PX, merge, size, width // CELL_PX, merge, size, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * size * size)


def _cell_labels(scene: Scene, spots: tuple[Spot, ...], columns: int, rows: int) -> Integers:
    x, y = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    labels = np.zeros((rows, columns, len(CELL_LABELS)), np.int64)
    labels[..., list(CELL_LABELS).index("num_shapes")] = len(scene.shapes)
    for number, (shape, spot) in enumerate(zip(scene.shapes, spots, strict=True), 1):
        shown = (abs(x - spot.x) < spot.radius_x * _COVERED_SHARE) & (abs(y - spot.y) < spot.radius_y * _COVERED_SHARE)
        shown[min(int(spot.y * rows), rows - 1), min(int(spot.x * columns), columns - 1)] = True
        labels[shown] = (
            SHAPES.index(shape.kind) + 1,
            COLORS.index(shape.color) + 1,
            PLACES.index(shape.place) + 1 if shape.place else len(PLACES) + 1,
            number,
            len(scene.shapes),
            sum(other.color == shape.color for other in scene.shapes),
            sum(other.kind == shape.kind for other in scene.shapes),
        )
    return labels.reshape(-1, len(CELL_LABELS))
