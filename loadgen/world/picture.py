"""Draws a scene with Pillow, as a person would: filled or thin outlines, no smoothing, a plain light background."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from triptych.loadgen.world.colors import RGB, pick_background, pick_rgb
from triptych.loadgen.world.scene import Scene, Shape

CELL_PX = 28  # a cell of the model: 2 x 2 patches of 14 pixels
OUTLINE_SHARE = 0.25  # chosen
NOISE_SHARE = 0.15  # chosen
MIN_PX, MAX_PX = 112, 448  # sides of the pictures that the demo checkpoint is trained on


class Spot(NamedTuple):
    """Where a shape landed: its center and half its box, in fractions of width (x) and height (y)."""

    x: float
    y: float
    radius_x: float
    radius_y: float


class _Pen(NamedTuple):
    """Where and how to draw one shape, in pixels; line_px 0: filled."""

    x: int
    y: int
    radius: int
    rgb: RGB
    line_px: int


def render(scene: Scene, width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, tuple[Spot, ...]]:
    """The picture, and where each shape of the scene landed in it."""
    shorter = min(width, height)
    pens = []
    for shape in scene.shapes:
        radius = round(shape.radius * shorter)
        line_px = _line_px(radius, shorter, rng) if rng.random() < OUTLINE_SHARE else 0
        pens.append(_Pen(round(shape.x * width), round(shape.y * height), radius, pick_rgb(shape.color, rng), line_px))
    image = Image.new("RGB", (width, height), pick_background([pen.rgb for pen in pens], rng))
    draw = ImageDraw.Draw(image)
    for shape, pen in zip(scene.shapes, pens, strict=True):
        _draw(draw, shape, pen, rng)
    if rng.random() < NOISE_SHARE:
        image = _with_noise(image, rng)
    spots = (Spot(pen.x / width, pen.y / height, pen.radius / width, pen.radius / height) for pen in pens)
    return image, tuple(spots)


def pick_cells(rng: np.random.Generator, medium: float = 0.2, large: float = 0.12) -> tuple[int, int]:
    """Columns and rows of cells.

    A side is 112 to 168 px, to 224 px with probability `medium`, to 448 px and of any aspect with probability `large`.
    """
    kind = rng.random()
    most = 16 if kind < large else 8 if kind < large + medium else 6
    columns, rows = rng.integers(4, most + 1, 2).tolist()
    return columns, rows


def pick_size(rng: np.random.Generator, medium: float = 0.2, large: float = 0.12) -> tuple[int, int]:
    """Width and height in pixels, as pick_cells has them but for up to half a cell: the processor then resizes."""
    around = np.multiply(pick_cells(rng, medium, large), CELL_PX) + rng.integers(-13, 15, 2)
    width, height = np.clip(around, MIN_PX, MAX_PX).tolist()
    return width, height


def _line_px(radius: int, shorter: int, rng: np.random.Generator) -> int:
    """2 to 8 pixels, more in a larger picture, less in a small shape."""
    wanted = round(shorter * rng.uniform(0.012, 0.03))
    return max(2, min(wanted, 8, radius // 4))


def _draw(draw: ImageDraw.ImageDraw, shape: Shape, pen: _Pen, rng: np.random.Generator) -> None:
    x, y, radius, rgb, line_px = pen
    style = {"outline": rgb, "width": line_px} if line_px else {"fill": rgb}
    if shape.kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), **style)
    elif shape.kind == "square":
        side = round(0.9 * radius)
        draw.rectangle((x - side, y - side, x + side, y + side), **style)
    elif shape.kind == "triangle":
        corners = [(round(x + radius * right), round(y + radius * down)) for right, down in _triangle(rng)]
        draw.polygon(corners, **style)
    else:
        _draw_cross(draw, pen, diagonal=rng.random() < 0.1, arm=round(radius * rng.uniform(0.2, 0.38)))


def _triangle(rng: np.random.Generator) -> list[tuple[float, float]]:
    """Corners in a box from -1 to 1: mostly upright and even, else turned by a quarter or with a right angle."""
    kind = rng.random()
    if kind < 0.1:
        half_width = rng.uniform(0.7, 1)
        return [(-half_width, -0.9), (-half_width, 0.9), (half_width, 0.9)]
    half_width, height = rng.uniform(0.75, 1), rng.uniform(0.7, 1)
    corners = [(0.0, -height), (half_width, height), (-half_width, height)]
    turns = int(rng.integers(1, 4)) if kind < 0.2 else 0
    for _ in range(turns):
        corners = [(-down, right) for right, down in corners]
    return corners


def _draw_cross(draw: ImageDraw.ImageDraw, pen: _Pen, diagonal: bool, arm: int) -> None:
    """A plus sign or an X: two bars, thin ones for an outline."""
    x, y, radius, rgb, line_px = pen
    width = line_px or 2 * arm
    if diagonal:
        reach = round(radius * math.sqrt(0.5))
        for right in (reach, -reach):
            draw.line((x - right, y - reach, x + right, y + reach), fill=rgb, width=width)
        return
    half = width // 2
    draw.rectangle((x - half, y - radius, x - half + width - 1, y + radius), fill=rgb)
    draw.rectangle((x - radius, y - half, x + radius, y - half + width - 1), fill=rgb)


def _with_noise(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    noise = rng.standard_normal((image.height, image.width, 1), dtype=np.float32) * rng.uniform(1, 5)
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
