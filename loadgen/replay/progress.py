"""Live figures of a replay: a bar that moves on a terminal, else a line now and then."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from triptych.loadgen.replay.outcome import RequestOutcome

NUM_RECENT = 1000  # outcomes that percentiles are of; chosen
REDRAW_EVERY_S = 0.5  # a redraw takes a few milliseconds of the sender's loop
LINE_EVERY_S = 10.0  # chosen
LONG_WAIT_S = 10.0  # chosen: who watches wonders by then


class Live:
    """Takes every outcome; `line` tells how it goes."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.num_good = 0
        self.errors: Counter[str] = Counter()
        self._num_right = self._num_known = 0
        self._ttfts_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._lags_s: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, outcome: RequestOutcome) -> None:
        self.num_ended += 1
        if outcome.error is None:
            self.num_good += 1
        else:
            self.errors[outcome.error] += 1
        if outcome.is_right is not None:
            self._num_known += 1
            self._num_right += outcome.is_right
        if outcome.ttft_s is not None:
            self._ttfts_s.append(outcome.ttft_s)
        self._lags_s.append(outcome.send_lag_s)

    def line(self, elapsed_s: float, num_due: int, next_s: float = 0.0) -> str:
        """All since the start, percentiles of the last NUM_RECENT. next_s: when the next request is due."""
        parts = [f"{elapsed_s:.0f} s: {num_due:,} due, {num_due - self.num_ended:,} running, {self.num_good:,} answered"]
        parts += [f"{count:,} {kind}" for kind, count in self.errors.most_common()]
        if self._num_known:
            parts.append(f"{self._num_right / self._num_known:.1%} of answers right")
        if self._ttfts_s:
            ordered = sorted(self._ttfts_s)
            parts.append(f"TTFT p50 {_percentile(ordered, 50):.3g} s p99 {_percentile(ordered, 99):.3g} s")
        if self._lags_s:
            parts.append(f"send lag p99 {1000 * _percentile(sorted(self._lags_s), 99):.1f} ms")
        if next_s - elapsed_s > LONG_WAIT_S:
            parts.append(f"nothing is due for {next_s - elapsed_s:,.0f} s")
        return ", ".join(parts)


async def show(live: Live, tell: Callable[[], str], console: Console, total: int | None) -> None:
    """Show what `tell` says, until cancelled. total: requests to come, where that is known."""
    if console.is_terminal:
        await _bar(live, tell, console, total)
    else:
        await _lines(tell, console)


async def _bar(live: Live, tell: Callable[[], str], console: Console, total: int | None) -> None:
    columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        item = bar.add_task("", total=total)
        while True:
            bar.update(item, description=tell(), completed=live.num_ended, refresh=True)
            await asyncio.sleep(REDRAW_EVERY_S)


async def _lines(tell: Callable[[], str], console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        console.print(tell(), markup=False, highlight=False, soft_wrap=True)


def _percentile(ordered: Sequence[float], level: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * level // 100)]
