"""The run over time, in a bounded number of bins: when the run outgrows them, two neighbours become one of twice the width."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triptych.loadgen.replay.outcome import LEFT_OUT, RequestOutcome
from triptych.loadgen.report.histogram import Histogram
from triptych.loadgen.report.schema import ClassOverTime, OverTime

FIRST_WIDTH_S = 1.0
MAX_BINS = 120  # chosen: a dot every few pixels, more are noise


@dataclass(slots=True)
class _Bin:
    """Sums over one bin: two bins add up to one. Requests in flight are kept as changes, +1 and -1: their sum, and the sum of
    each times its time, from which the mean over the bin follows."""

    num_arrivals: Counter[str] = field(default_factory=Counter)
    ttfts_s: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    num_tokens: float = 0.0
    num_errors: int = 0
    change: int = 0
    change_times_s: float = 0.0

    def __iadd__(self, other: _Bin) -> _Bin:
        self.num_arrivals.update(other.num_arrivals)
        for name, ttfts_s in other.ttfts_s.items():
            self.ttfts_s[name] += ttfts_s
        self.num_tokens += other.num_tokens
        self.num_errors += other.num_errors
        self.change += other.change
        self.change_times_s += other.change_times_s
        return self


class TimeBins:
    """Takes outcomes in any order, gives the series."""

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self._max_bins = max_bins
        self._width_s = FIRST_WIDTH_S
        self._bins: list[_Bin] = []

    def add(self, outcome: RequestOutcome, is_measured: bool) -> None:
        """is_measured: whether its TTFT counts."""
        arrival = self._at(outcome.scheduled_s)
        arrival.num_arrivals[outcome.request_class] += 1
        if is_measured and outcome.ttft_s is not None:
            arrival.ttfts_s[outcome.request_class].add(outcome.ttft_s)
        for time_s, change in ((outcome.sent_s, 1), (outcome.end_s, -1)):
            bin_ = self._at(time_s)
            bin_.change += change
            bin_.change_times_s += change * time_s
        if outcome.error is not None and outcome.error not in LEFT_OUT:
            self._at(outcome.end_s).num_errors += 1
        if outcome.first_token_s is not None:
            num_chunks = len(outcome.token_gaps_s) + 1
            tokens_per_chunk = max(outcome.num_output_tokens, num_chunks) / num_chunks
            for time_s in itertools.accumulate(outcome.token_gaps_s, initial=outcome.first_token_s):
                self._at(time_s).num_tokens += tokens_per_chunk

    def series(self, names: Iterable[str]) -> OverTime:
        """names: the classes, in the order wanted."""
        return OverTime(
            width_s=self._width_s,
            classes=[self._of_class(name) for name in names],
            in_flight=self._in_flight(),
            output_tokens_per_s=[bin_.num_tokens / self._width_s for bin_ in self._bins],
            num_errors=[bin_.num_errors for bin_ in self._bins],
        )

    def _at(self, time_s: float) -> _Bin:
        while time_s >= self._width_s * self._max_bins:
            self._fold()
        index = max(0, int(time_s / self._width_s))
        if index >= len(self._bins):
            self._bins += (_Bin() for _ in range(index + 1 - len(self._bins)))
        return self._bins[index]

    def _fold(self) -> None:
        self._width_s *= 2
        for index in range(0, len(self._bins) - 1, 2):
            self._bins[index] += self._bins[index + 1]
        self._bins = self._bins[::2]

    def _in_flight(self) -> list[float]:
        level, means = 0, []
        for index, bin_ in enumerate(self._bins):
            end_s = (index + 1) * self._width_s
            means.append(max(0.0, level + (bin_.change * end_s - bin_.change_times_s) / self._width_s))
            level += bin_.change
        return means

    def _of_class(self, name: str) -> ClassOverTime:
        of_bins = (bin_.ttfts_s.get(name) for bin_ in self._bins)
        found: list[Sequence[float | None]] = [
            ttfts_s.percentiles((50, 99)) if ttfts_s else (None, None) for ttfts_s in of_bins
        ]
        return ClassOverTime(
            name=name,
            num_arrivals=[bin_.num_arrivals[name] for bin_ in self._bins],
            ttft_p50_s=[p50 for p50, _ in found],
            ttft_p99_s=[p99 for _, p99 in found],
        )
