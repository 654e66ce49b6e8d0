"""Builds a report from outcomes as they come, in constant memory. `results.py` calls it, and whoever has outcomes of another
origin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

import msgspec

from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.caveats import caveats
from triptych.loadgen.report.histogram import Histogram
from triptych.loadgen.report.over_time import TimeBins
from triptych.loadgen.report.schema import CURVE_LEVELS, ClassFigures, Curve, CurveFigure, Report
from triptych.loadgen.report.tally import Tally, distribution

ALL = "all"
# Classes by number of pictures, each up to so many. Chosen: most requests have few
PICTURES = {0: "", 1: "1 picture", 2: "2 pictures", 3: "3 pictures", 4: "4 pictures", 8: "5-8 pictures", 16: "9-16 pictures"}
MORE_PICTURES = "over 16 pictures"


class ReportBuilder:
    """Takes outcomes, gives the report of those taken so far.

    Args:
        conditions: for the limits that requests are to meet.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)  # by class and number of pictures
        self._warm_up = Tally()
        self._time_bins = TimeBins()

    def add(self, outcome: RequestOutcome) -> None:
        """Take in one outcome."""
        pictures = next((text for most, text in PICTURES.items() if outcome.num_images <= most), MORE_PICTURES)
        tally = self._warm_up if outcome.is_warm_up else self._tallies[outcome.request_class, pictures]
        # A failed request tells no size to scale limits with; it has missed whatever they are
        sized = outcome if outcome.error is None else replace(outcome, num_prompt_tokens=1)
        tally.add(outcome, self._conditions.class_wide_limits(outcome), self._conditions.own_scaled_limits(sized))
        self._time_bins.add(outcome, is_measured=outcome.error is None and not outcome.is_warm_up)

    def report(self, notes: Iterable[str] = ()) -> Report:
        """notes: further warnings."""
        names = sorted({name for name, _ in self._tallies}, key=lambda name: (name != "text", name))
        seen = {pictures for _, pictures in self._tallies}
        pictures = [text for text in (*PICTURES.values(), MORE_PICTURES) if text and text in seen]
        whole = _sum(self._tallies.values())
        by_class = {ALL: whole} | {name: self._sum_of(name) for name in names}
        every = by_class | {text: self._sum_of(text) for text in pictures}
        span_s, arrivals_s = whole.run.length_s, whole.arrivals.length_s
        return Report(
            label=self._conditions.label,
            conditions=msgspec.to_builtins(self._conditions),
            span_s=span_s,
            warnings=[*caveats(self._conditions, whole, names), *notes],
            classes=[tally.figures(name, span_s, arrivals_s) for name, tally in every.items()],
            warm_up=self._warm_up_figures(),
            send_lag_s=distribution(whole.send_lag_s),
            over_time=self._time_bins.series(names) if names else None,
            curves=[curve for name, tally in by_class.items() for curve in _curves(name, tally)],
        )

    def _sum_of(self, part: str) -> Tally:
        return _sum(tally for key, tally in self._tallies.items() if part in key)

    def _warm_up_figures(self) -> ClassFigures | None:
        warm_up = self._warm_up
        if not warm_up.num_requests + warm_up.num_cancelled + warm_up.num_unfinished:
            return None
        return warm_up.figures("warm-up", warm_up.run.length_s, warm_up.arrivals.length_s)


def _curves(name: str, tally: Tally) -> Iterator[Curve]:
    """Levels that less than one request lies beyond are left out."""
    for figure in get_args(CurveFigure):
        histogram: Histogram = getattr(tally, figure)
        levels = [level for level in CURVE_LEVELS if histogram.count * (100 - level) > 99.9]
        if levels:
            yield Curve(figure=figure, class_name=name, values=histogram.percentiles(levels))


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total += tally
    return total
