"""Which charts the page shows: load and latency over the run, and how each latency spreads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from xml.etree.ElementTree import Element

from triptych.loadgen.report.figures import LATENCIES
from triptych.loadgen.report.markup import tag
from triptych.loadgen.report.schema import OverTime, Report
from triptych.loadgen.report.style import NUM_COLORS
from triptych.shared.charts import Axis, Line, draw, linear_axis, log_axis
from triptych.shared.units import duration, number

SHORTEST_S = 1e-6  # shown on a logarithmic axis
CURVE_TICKS = (50.0, 90.0, 99.0, 99.9)


def charts(report: Report) -> Iterator[Element]:
    """A card for each chart that there is data for."""
    if report.over_time is not None:
        yield from _over_time(report.over_time)
    for latency in LATENCIES:
        curves = [curve for curve in report.curves if curve.figure == latency.field and curve.values]
        lines = [
            Line(curve.class_name, color(index), list(zip(report.curve_levels, curve.values, strict=False)))
            for index, curve in enumerate(curves)
        ]
        if lines:
            yield _card(f"{latency.title} by percentile", "", _percentile_axis(lines), _latency_axis(lines), lines)


def color(index: int) -> str:
    """The style of the index-th line."""
    return f"c{index % NUM_COLORS}"


def _over_time(run: OverTime) -> Iterator[Element]:
    width_s, count = run.width_s, len(run.in_flight)
    time = linear_axis(count * width_s, lambda value_s: f"{value_s:g} s", is_exact=True)

    def line(name: str, style: str, values: Iterable[float | None]) -> Line:
        return Line(name, style, [((index + 0.5) * width_s, value) for index, value in enumerate(values)])

    def card(title: str, lines: Sequence[Line]) -> Element:
        return _card(title, f"in bins of {number(width_s)} s", time, _count_axis(lines), lines)

    # Colours as of the curves, whose first is the one of all classes
    styles = {of.name: color(index + 1) for index, of in enumerate(run.classes)}
    yield card(
        "Arrivals per second",
        [line(of.name, styles[of.name], (num / width_s for num in of.num_arrivals)) for of in run.classes],
    )
    in_flight = [line("in flight", "c0", run.in_flight)]
    errors = [line("failed in the bin", "c5", map(float, run.num_errors))] if any(run.num_errors) else []
    yield card("Requests in flight", in_flight + errors)
    ttfts = [
        line(f"{of.name} {name}", styles[of.name] + extra, values)
        for of in run.classes
        for name, extra, values in (("p50", " thin", of.ttft_p50_s), ("p99", "", of.ttft_p99_s))
        if any(value is not None for value in values)
    ]
    if ttfts:
        yield _card("TTFT by time of arrival", f"in bins of {number(width_s)} s", time, _latency_axis(ttfts), ttfts)
    yield card("Output tokens per second", [line("output tokens/s", "c0", run.output_tokens_per_s)])


def _card(title: str, note: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Element:
    keys = [tag("span", tag("span", css=f"key {line.style}"), line.name) for line in lines]
    head = tag("h3", title, *([tag("span", f" {note}", css="soft")] if note else []))
    return tag("div", head, draw(title, x, y, lines), tag("div", *keys, css="legend"), css="card")


def _values(lines: Iterable[Line]) -> Iterator[float]:
    return (value for line in lines for _, value in line.points if value is not None)


def _count_axis(lines: Sequence[Line]) -> Axis:
    return linear_axis(max(_values(lines), default=0.0), number)


def _latency_axis(lines: Sequence[Line]) -> Axis:
    return log_axis([max(SHORTEST_S, value) for value in _values(lines)], duration)


def _percentile_axis(lines: Sequence[Line]) -> Axis:
    """p90, p99 and p99.9 stand equally far apart: the tail is what differs."""
    last = max(level for line in lines for level, _ in line.points)
    ticks = [(level, f"p{level:g}") for level in CURVE_TICKS if level <= last]
    return Axis(0.0, max(last, CURVE_TICKS[0]), ticks, lambda level: -math.log10(1 - level / 100))
