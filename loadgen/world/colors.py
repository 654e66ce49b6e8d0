"""Colour names and the RGB values that people mean by them; plain light backgrounds that set them off."""

from __future__ import annotations

import numpy as np
from PIL import ImageColor

from triptych.loadgen.world.seeds import pick

RGB = tuple[int, int, int]

# Names are CSS's and Pillow's; the others come from plotting and office palettes. Zones that two people would name differently
# (magenta, teal, olive, maroon, cyan) are left out, and so is firebrick: it is 20 steps from Pillow's "brown".
_VALUES = {
    "red": ("red", "crimson", "#dc1e1e", "#d62728", "#e63946"),
    "green": ("green", "lime", "forestgreen", "limegreen", "darkgreen", "seagreen", "#1ea032", "#2ca02c"),
    "blue": ("blue", "royalblue", "navy", "dodgerblue", "mediumblue", "steelblue", "#2846dc", "#1f77b4"),
    "yellow": ("yellow", "gold", "#f0cd14", "#ffe135"),
    "orange": ("orange", "darkorange", "#ff7f0e", "#f28c28"),
    "purple": ("purple", "darkviolet", "blueviolet", "indigo", "darkorchid", "rebeccapurple", "#8c28aa"),
    "pink": ("pink", "hotpink", "lightpink", "deeppink"),
    "brown": ("brown", "saddlebrown", "sienna", "#7b4a2a"),
    "gray": ("gray", "dimgray", "darkgray", "#7f7f7f"),
    "black": ("black", "#141414", "#202020"),
}
COLORS = tuple(_VALUES)
_LIGHT = ("whitesmoke", "ivory", "beige", "linen", "lightyellow", "lavender", "aliceblue", "honeydew", "mistyrose", "lightgray")
WHITE: RGB = (255, 255, 255)
NAMESAKE_SHARE = 0.5  # of the shapes have the first value, Pillow's own under the name; chosen: what people type first
EXACT_SHARE = 0.5  # of the shapes have a value of the table and not one near it; chosen
JITTER = 10  # steps of 255; chosen: less than half of the way to a value of another name
WHITE_SHARE = 0.45  # of the backgrounds; chosen: what most people draw on
MIN_CONTRAST = 60  # distance in RGB, chosen: Pillow's pink on white has 82


def _rgb(name: str) -> RGB:
    red, green, blue = ImageColor.getrgb(name)[:3]
    return red, green, blue


VALUES: dict[str, tuple[RGB, ...]] = {name: tuple(map(_rgb, values)) for name, values in _VALUES.items()}
BACKGROUNDS: tuple[RGB, ...] = tuple(map(_rgb, _LIGHT))


def pick_rgb(color: str, rng: np.random.Generator) -> RGB:
    """One of the values of the name, half of the time a little off."""
    values = VALUES[color]
    base = values[0] if rng.random() < NAMESAKE_SHARE else pick(values, rng)
    return base if rng.random() < EXACT_SHARE else _near(base, JITTER, rng)


def pick_background(shapes: list[RGB], rng: np.random.Generator) -> RGB:
    """White, or a light plain colour, from which every one of the shapes' colours is clearly distinct."""
    if rng.random() < WHITE_SHARE:
        return WHITE
    if rng.random() < 0.5:
        background = pick(BACKGROUNDS, rng)
    else:
        level = int(rng.integers(215, 256))
        background = _near((level, level, level), 8, rng)
    return background if all(contrast(background, rgb) >= MIN_CONTRAST for rgb in shapes) else WHITE


def contrast(one: RGB, other: RGB) -> float:
    """Distance in RGB."""
    return float(np.linalg.norm(np.subtract(one, other)))


def _near(base: RGB, steps: int, rng: np.random.Generator) -> RGB:
    """Lighter or darker by up to so many steps, and a little off in hue: a gray stays gray."""
    hue = max(steps // 3, 1)
    moved = np.add(base, rng.integers(-steps, steps + 1) + rng.integers(-hue, hue + 1, 3))
    red, green, blue = np.clip(moved, 0, 255).tolist()
    return red, green, blue
