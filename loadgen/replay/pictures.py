"""The pictures of a replay: scenes of the world, drawn and compressed once before it, then given out by size and popularity.

Every picture given out is a variant of one of few drawings (png.py): what a server can tell apart, it must encode again.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from triptych.loadgen.replay.png import MAX_SERIAL, PngTemplate
from triptych.loadgen.world import Scene, generator, make_scene, pick_size, render

NUM_DRAWINGS = 64  # chosen: drawn in a second or two, and sizes enough for a distribution
MIN_PX, MAX_PX = 64, 2048  # chosen: of the sides that are drawn
# ShareGPT-4o's pictures, which ModServe's traces were replayed with: median about 500 px a side, p95 over 1000.
MEDIAN_SIDE_PX = 500.0
SIDE_SIGMA = 0.45  # of the side's logarithm: p95 is 1050 px
ASPECT_SIGMA = 0.25  # of width's and height's logarithms around the side; chosen: 4:3 is within one sigma
_NORMAL = NormalDist()
SIZE_FORM = "trace (what its image tokens come to, else as photos), photos, world, or WIDTHxHEIGHT"
REUSE_FORM = "none, or zipf:EXPONENT such as zipf:1.1"


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """size: see SIZE_FORM; `world` is what the demo model is trained on. zipf: how steeply popularity falls over num_popular
    pictures, whose sizes are then their own; None: no picture comes twice."""

    size: str | tuple[int, int] = "trace"
    zipf: float | None = None
    num_popular: int = 1000


@dataclass(frozen=True, slots=True)
class Picture:
    """png64: a PNG file in base64, in pieces."""

    scene: Scene
    width: int
    height: int
    png64: tuple[bytes, bytes, bytes]


def parse_size(text: str) -> str | tuple[int, int]:
    """Raises ValueError."""
    if text in ("trace", "photos", "world"):
        return text
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
    if match is None or not all(MIN_PX <= side <= 2 * MAX_PX for side in (int(match[1]), int(match[2]))):
        raise ValueError(f"{text!r} is no picture size: {SIZE_FORM}, {MIN_PX} to {2 * MAX_PX} a side")
    return int(match[1]), int(match[2])


def parse_reuse(text: str) -> float | None:
    """The exponent. Raises ValueError."""
    if text == "none":
        return None
    match = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", text)
    if match is None:
        raise ValueError(f"{text!r} is no popularity: {REUSE_FORM}")
    return float(match[1])


class PicturePool:
    """Drawn in __init__, which takes seconds: call it in a thread."""

    def __init__(self, options: PictureOptions, seed: int) -> None:
        self._options = options
        self._drawings = list(_draw(options.size, seed))
        self._by_size = sorted(range(NUM_DRAWINGS), key=lambda number: self._num_pixels(number))
        self._simple = [number for number, (scene, _) in enumerate(self._drawings) if len(scene.shapes) <= 2]
        weights = np.arange(1, options.num_popular + 1, dtype=float) ** -(options.zipf or 0.0)
        self._popularity = np.cumsum(weights) / weights.sum()

    def pick(self, rng: np.random.Generator, is_simple: bool = False, num_pixels: float | None = None) -> Picture:
        """A picture by popularity, or one that never was before.

        Args:
            is_simple: of one or two shapes, as the world's questions about several pictures have them.
            num_pixels: as the trace has it, where that matters.
        """
        numbers: Sequence[int] = self._simple if is_simple else range(NUM_DRAWINGS)
        if self._options.zipf is None:
            number = numbers[int(rng.integers(len(numbers)))]
            if num_pixels is not None and self._options.size == "trace":
                number = self._nearest(num_pixels)
            return self._variant(number, int(rng.integers(MAX_SERIAL + 1)))
        rank = min(int(np.searchsorted(self._popularity, rng.random())), self._options.num_popular - 1)
        return self._variant(numbers[rank % len(numbers)], rank)

    def extremes(self) -> list[Picture]:
        """The smallest and the largest: what pictures cost in tokens is measured with them."""
        return [self._variant(number, MAX_SERIAL) for number in (self._by_size[0], self._by_size[-1])]

    @property
    def median_bytes(self) -> int:
        sizes = sorted(sum(map(len, template.variant(0))) * 3 // 4 for _, template in self._drawings)
        return sizes[len(sizes) // 2]

    def _num_pixels(self, number: int) -> int:
        return self._drawings[number][1].width * self._drawings[number][1].height

    def _nearest(self, num_pixels: float) -> int:
        """By the ratio of their sizes."""
        at = bisect.bisect(self._by_size, num_pixels, key=self._num_pixels)
        return min(
            self._by_size[max(0, at - 1) : at + 1], key=lambda number: abs(math.log(self._num_pixels(number) / num_pixels))
        )

    def _variant(self, number: int, serial: int) -> Picture:
        scene, template = self._drawings[number]
        return Picture(scene, template.width, template.height, template.variant(serial))


def _draw(size: str | tuple[int, int], seed: int) -> Iterator[tuple[Scene, PngTemplate]]:
    """Scenes that training never sees, in the order of a shuffled deck: popular pictures are of all sizes."""
    rng = generator(seed, held_out=True)
    for number in rng.permutation(NUM_DRAWINGS).tolist():
        scene = make_scene(rng, 1, 2 + number % 2)
        width, height = _pick_size(size, (number + 0.5) / NUM_DRAWINGS, rng)
        yield scene, PngTemplate(render(scene, width, height, rng)[0])


def _pick_size(size: str | tuple[int, int], quantile: float, rng: np.random.Generator) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    if size == "world":
        return pick_size(rng)
    side = MEDIAN_SIDE_PX * math.exp(SIDE_SIGMA * _NORMAL.inv_cdf(quantile))
    stretch = math.exp(ASPECT_SIGMA * rng.standard_normal())
    width, height = np.clip((round(side * stretch), round(side / stretch)), MIN_PX, MAX_PX).tolist()
    return width, height
