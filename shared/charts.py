"""Line charts as inline SVG. Colours are classes that the page's style sheet defines, so that a chart follows light and dark.

y axis label
|   ____/\\__  plot area
|__/
x axis labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

# Units of the view box: the page scales it to the column, so that letters stay readable on a phone
WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 10, 24
NUM_TICKS = 4  # at most, above 0, on a linear axis

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Line:
    """style: CSS classes. Points come with ascending x; one without y interrupts the line."""

    name: str
    style: str
    points: Points


@dataclass(frozen=True, slots=True)
class Axis:
    """ticks: values and how they are written."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    scale: Callable[[float], float] = float

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(min(self.high, max(self.low, value))) - low) / (high - low)


def linear_axis(high: float, shown: Callable[[float], str], is_exact: bool = False) -> Axis:
    """From 0 to a round number, or, if is_exact, to `high`."""
    high = high or 1.0
    step = _round_step(high / NUM_TICKS)
    num_steps = math.floor(high / step + 1e-9) if is_exact else math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(num_steps + 1)]
    return Axis(0.0, high if is_exact else ticks[-1], [(tick, shown(tick)) for tick in ticks])


def log_axis(values: Sequence[float], shown: Callable[[float], str]) -> Axis:
    """Whole decades around the values, or the nearest of 1, 2 and 5 where they span little. Values are above 0."""
    low, high = min(values), max(values)
    steps = (1,) if high / low > 200 else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [step * 10.0**decade for decade in decades for step in steps]
    low = max((mark for mark in marks if mark <= low * (1 + 1e-9)), default=low)
    high = min((mark for mark in marks if mark >= high * (1 - 1e-9) and mark > low), default=low * 10)
    return Axis(low, high, [(mark, shown(mark)) for mark in marks if low <= mark <= high], math.log)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= least * (1 - 1e-9))


def draw(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Element:
    """The chart. title: what a screen reader says."""
    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "class": "chart"})
    SubElement(svg, "title").text = title
    bottom = HEIGHT - BOTTOM
    for value, text in y.ticks:
        height = _y(y, value)
        SubElement(svg, "line", {"x1": str(LEFT), "x2": str(WIDTH - RIGHT), "y1": height, "y2": height, "class": "grid-line"})
        SubElement(svg, "text", {"x": str(LEFT - 6), "y": height, "dy": "0.35em", "class": "tick y"}).text = text
    for value, text in x.ticks:
        SubElement(svg, "text", {"x": _x(x, value), "y": str(bottom + 16), "class": "tick x"}).text = text
    for line in lines:
        for run in _runs(line.points):
            places = [f"{_x(x, at)},{_y(y, value)}" for at, value in run]
            places *= 2 if len(places) == 1 else 1  # a line without length is a dot
            SubElement(svg, "polyline", {"points": " ".join(places), "class": f"line {line.style}"})
    return svg


def _runs(points: Points) -> Iterator[list[tuple[float, float]]]:
    """Uninterrupted pieces."""
    run: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _x(axis: Axis, value: float) -> str:
    return f"{LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT):.1f}"


def _y(axis: Axis, value: float) -> str:
    return f"{HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - BOTTOM - TOP):.1f}"
