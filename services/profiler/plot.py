"""Draws a profile as SVG: for each stage what the fit predicts over what was measured, held-out passes filled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from triptych.services.profiler.summary import MAX_P95_ERROR
from triptych.shared.cost_model.profile import Profile, StageProfile
from triptych.shared.errors import BadRequest

SIDE = 220  # of a panel's square, like all that follow in SVG units
MARGIN = 45
RADIUS = 3
COLOR = "#1f6fb4"
STYLE = f"text{{font:12px sans-serif}}.exact{{stroke:#444}}.band{{stroke:#bbb;stroke-dasharray:4}}.dot{{stroke:{COLOR}}}"


def write_plot(profile: Profile, path: Path) -> None:
    """One file with a panel for each stage.

    Raises:
        BadRequest: it can't be written.
    """
    try:
        path.write_text(svg_of(profile), encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write the plot: {path.name}: {error.strerror}", code="bad_setting") from error


def svg_of(profile: Profile) -> str:
    """Logarithmic axes; the lines are the exact prediction and the error that the promise allows to one pass in twenty."""
    panels = [
        f'<g transform="translate({MARGIN + i * (SIDE + MARGIN)},{MARGIN})">{"".join(_panel(name, stage))}</g>'
        for i, (name, stage) in enumerate(profile.stages())
    ]
    width, height = MARGIN + len(panels) * (SIDE + MARGIN), SIDE + 2 * MARGIN
    title = escape(f"{profile.model.name} on {profile.machine}: predicted over measured, ms; held out: filled")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/><text x="{MARGIN}" y="18">{title}</text>{"".join(panels)}</svg>\n'
    )


def _panel(name: str, stage: StageProfile) -> Iterator[str]:
    pairs = [(point.seconds, stage.costs.pass_s(point.work)) for point in stage.points]
    low = math.log10(min(min(pair) for pair in pairs)) - 0.1
    high = math.log10(max(max(pair) for pair in pairs)) + 0.1

    def at(seconds: float) -> float:
        return SIDE * (math.log10(seconds) - low) / (high - low)

    yield f'<text y="-6">{name}: {stage.error.median:.1%}, {stage.error.p95:.1%} at 95 %</text>'
    yield f'<rect class="exact" width="{SIDE}" height="{SIDE}" fill="none"/>'
    for factor, kind in ((1 - MAX_P95_ERROR, "band"), (1.0, "exact"), (1 + MAX_P95_ERROR, "band")):
        yield _diagonal(SIDE * math.log10(factor) / (high - low), kind)
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        where, label = at(10.0**exponent), f"{10.0 ** (exponent + 3):g}"
        yield f'<text x="{where:.1f}" y="{SIDE + 14}" text-anchor="middle">{label}</text>'
        yield f'<text x="-4" y="{SIDE - where:.1f}" text-anchor="end">{label}</text>'
    for point, (measured_s, predicted_s) in zip(stage.points, pairs, strict=True):
        fill = COLOR if point.is_held_out else "none"
        yield f'<circle class="dot" cx="{at(measured_s):.1f}" cy="{SIDE - at(predicted_s):.1f}" r="{RADIUS}" fill="{fill}"/>'


def _diagonal(shift: float, kind: str) -> str:
    """predicted = measured, moved up by `shift`, inside the square."""
    begin, end = max(0.0, -shift), min(SIDE, SIDE - shift)
    return (
        f'<line class="{kind}" x1="{begin:.1f}" y1="{SIDE - begin - shift:.1f}" x2="{end:.1f}" y2="{SIDE - end - shift:.1f}"/>'
    )
