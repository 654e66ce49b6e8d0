"""Draws a profile as SVG: for each stage what the fit predicts over what was measured, held-out passes dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from triptych.services.profiler.summary import MAX_P95_ERROR
from triptych.shared.charts import HEIGHT, LEFT, WIDTH, Axis, Line, draw, log_axis
from triptych.shared.cost_model.profile import Profile, StageProfile
from triptych.shared.errors import BadRequest
from triptych.shared.units import duration, plain

COLUMNS = 2
HEAD = 40  # room for a title above the page and above each chart, in the charts' units
STYLE = (
    "text{font:11px sans-serif}.grid-line{stroke:#e8ecf0}.tick.x{text-anchor:middle}.tick.y{text-anchor:end}"
    ".line{fill:none}.exact{stroke:#444}.band{stroke:#bbb;stroke-dasharray:4}"
    ".dots{stroke-width:6;stroke-linecap:round}.fitted{stroke:#9cc3e6}.held-out{stroke:#1f6fb4}"
)


def write_plot(profile: Profile, path: Path) -> None:
    """One file with a chart for each stage.

    Raises:
        BadRequest: it can't be written.
    """
    try:
        path.write_text(svg_of(profile), encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write the plot: {path.name}: {error.strerror}", code="bad_setting") from error


def svg_of(profile: Profile) -> str:
    """Logarithmic axes; the lines are the exact prediction and the error that the promise allows to one pass in twenty."""
    stages = profile.stages()
    height = HEAD + math.ceil(len(stages) / COLUMNS) * (HEAD + HEIGHT)
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {COLUMNS * WIDTH} {height}"})
    SubElement(svg, "style").text = STYLE
    SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    title = f"{profile.model.name} on {profile.machine}: predicted over measured times; held out: dark"
    SubElement(svg, "text", {"x": str(LEFT), "y": str(HEAD / 2)}).text = plain(title)
    for index, (name, stage) in enumerate(stages):
        x, y = index % COLUMNS * WIDTH, HEAD + index // COLUMNS * (HEAD + HEIGHT)
        title = f"{name}: {stage.error.median:.1%}, {stage.error.p95:.1%} at 95 %"
        SubElement(svg, "text", {"x": str(x + LEFT), "y": str(y + HEAD / 2)}).text = title
        chart = _chart(title, stage)
        chart.attrib |= {"x": str(x), "y": str(y + HEAD), "width": str(WIDTH), "height": str(HEIGHT)}
        svg.append(chart)
    return tostring(svg, encoding="unicode") + "\n"


def _chart(title: str, stage: StageProfile) -> Element:
    passes = sorted((point.seconds, stage.costs.pass_s(point.work), point.is_held_out) for point in stage.points)
    axis = log_axis([time_s for *times_s, _ in passes for time_s in times_s], duration)
    lines = [
        _diagonal(axis, 1 - MAX_P95_ERROR, "band"),
        _diagonal(axis, 1.0, "exact"),
        _diagonal(axis, 1 + MAX_P95_ERROR, "band"),
        _dots("fitted", ((measured_s, predicted_s) for measured_s, predicted_s, is_held_out in passes if not is_held_out)),
        _dots("held-out", ((measured_s, predicted_s) for measured_s, predicted_s, is_held_out in passes if is_held_out)),
    ]
    return draw(title, axis, axis, lines)


def _diagonal(axis: Axis, factor: float, style: str) -> Line:
    """predicted = factor * measured, inside the chart."""
    ends_s = (max(axis.low, axis.low / factor), min(axis.high, axis.high / factor))
    return Line(style, style, [(end_s, factor * end_s) for end_s in ends_s])


def _dots(name: str, pairs: Iterable[tuple[float, float]]) -> Line:
    """A line that is interrupted after each point."""

    def points() -> Iterator[tuple[float, float | None]]:
        for measured_s, predicted_s in pairs:
            yield measured_s, predicted_s
            yield measured_s, None

    return Line(name, f"dots {name}", list(points()))
