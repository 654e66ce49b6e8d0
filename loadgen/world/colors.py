"""Colour names and the RGB values that people mean by them; plain light backgrounds that set them off."""

from __future__ import annotations

import numpy as np
from PIL import ImageColor

RGB = tuple[int, int, int]

# Names are CSS's and Pillow's; the others come from plotting and office palettes. Zones that two people would name differently
# (magenta, teal, olive, maroon, cyan) are left out, and so is firebrick: it is 20 steps from Pillow's "brown".
_VALUES = {
    "red": ("red", "crimson", "#dc1e1e", "#d62728", "#e63946"),
    "green": ("green", "lime", "forestgreen", "limegreen", "seagreen", "#1ea032", "#2ca02c"),
    "blue": ("blue", "royalblue", "navy", "dodgerblue", "mediumblue", "#2846dc", "#1f77b4"),
    "yellow": ("yellow", "gold", "#f0cd14", "#ffe135"),
    "orange": ("orange", "darkorange", "#ff7f0e", "#f28c28"),
    "purple": ("purple", "darkviolet", "blueviolet", "indigo", "rebeccapurple", "#8c28aa"),
    "pink": ("pink", "hotpink", "lightpink", "deeppink"),
    "brown": ("brown", "saddlebrown", "sienna", "#7b4a2a"),
    "gray": ("gray", "dimgray", "darkgray", "#7f7f7f"),
    "black": ("black", "#141414", "#202020"),
}
COLORS = tuple(_VALUES)
_LIGHT = ("whitesmoke", "ivory", "beige", "linen", "lightyellow", "lavender", "aliceblue", "honeydew", "mistyrose", "lightgray")
WHITE: RGB = (255, 255, 255)
EXACT_SHARE = 0.5  # chosen: half of the shapes have the very value that a person would type
JITTER = 10  # steps of 255, chosen: less than a third of the way to a value of another name
WHITE_SHARE = 0.45  # chosen: what most people draw on
MIN_CONTRAST = 60  # distance in RGB, chosen: Pillow's pink on white has 82


def _rgb(name: str) -> RGB:
    red, green, blue = ImageColor.getrgb(name)[:3]
    return red, green, blue


VALUES: dict[str, tuple[RGB, ...]] = {name: tuple(map(_rgb, values)) for name, values in _VALUES.items()}
BACKGROUNDS: tuple[RGB, ...] = tuple(map(_rgb, _LIGHT))


def pick_rgb(color: str, rng: np.random.Generator) -> RGB:
    """One of the values of the name, half of the time a little off."""
    values = VALUES[color]
    # The first value is the one that Pillow has under the name: as frequent as all others together.
    base = values[0] if rng.random() < 0.5 else values[int(rng.integers(len(values)))]
    if rng.random() < EXACT_SHARE:
        return base
    return _near(base, JITTER, rng)


def pick_background(shapes: list[RGB], rng: np.random.Generator) -> RGB:
    """White, or a light plain colour, from which every one of the shapes' colours is clearly distinct."""
    if rng.random() < WHITE_SHARE:
        return WHITE
    if rng.random() < 0.5:
        background = BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))]
    else:
        level = int(rng.integers(215, 256))
        background = _near((level, level, level), 8, rng)
    return background if all(contrast(background, rgb) >= MIN_CONTRAST for rgb in shapes) else WHITE


def contrast(one: RGB, other: RGB) -> float:
    """Distance in RGB."""
    return float(np.linalg.norm(np.subtract(one, other)))


def _near(base: RGB, steps: int, rng: np.random.Generator) -> RGB:
    red, green, blue = np.clip(np.add(base, rng.integers(-steps, steps + 1, 3)), 0, 255).tolist()
    return red, green, blue
