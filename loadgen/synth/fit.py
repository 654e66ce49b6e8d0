"""What a made trace came to, by class, and how far its percentiles are from the published ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.table import Table

from triptych.loadgen.synth.published import COUNTS, SIZES
from triptych.loadgen.synth.tables import Counts, Sizes
from triptych.loadgen.traces.row import TraceRow

PERCENTS = (10, 50, 90, 95, 99)
BINS_PER_E = 200  # a bin is half a percent wide: whole numbers up to 200 have one each
PUBLISHED: Mapping[str, Mapping[tuple[str, str], Sizes | Counts]] = {
    "azure-lmm": {
        ("text", "context tokens"): Sizes(SIZES["azure-lmm-text-context"]),
        ("text", "output tokens"): Sizes(SIZES["azure-lmm-text-generated"]),
        ("image", "context tokens"): Sizes(SIZES["azure-lmm-image-context"]),
        ("image", "output tokens"): Sizes(SIZES["azure-lmm-image-generated"]),
        ("image", "pictures"): Counts(COUNTS["azure-lmm"]),
    }
}


class Quantiles:
    """Percentiles of a stream of numbers above 0, in bounded memory."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self._bins[round(BINS_PER_E * math.log(value))] += 1

    def at(self, percent: float) -> int:
        wanted, seen = self._bins.total() * percent / 100, 0
        for bin_ in sorted(self._bins):
            seen += self._bins[bin_]
            if seen >= wanted:
                break
        return round(math.exp(bin_ / BINS_PER_E))


@dataclass(slots=True)
class Made:
    """Counts rows as they pass."""

    num_rows: int = 0
    num_image_rows: int = 0
    last_s: float = 0.0
    has_more_than_azure: bool = False
    quantiles: dict[tuple[str, str], Quantiles] = field(default_factory=dict)

    def counted(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        for row in rows:
            self.num_rows += 1
            self.num_image_rows += row.num_images > 0
            self.last_s = row.arrival_s
            self.has_more_than_azure |= row.session is not None or row.num_image_tokens is not None
            self._add(row, "context tokens", row.num_context_tokens)
            self._add(row, "output tokens", row.num_output_tokens)
            if row.num_images:
                self._add(row, "pictures", row.num_images)
            yield row

    def _add(self, row: TraceRow, what: str, value: int) -> None:
        self.quantiles.setdefault((row.request_class, what), Quantiles()).add(max(1, value))

    def errors(self, published: str) -> dict[tuple[str, str, int], float]:
        """(class, what, percent) -> made relative to published, less 1."""
        return {
            (*key, percent): self.quantiles[key].at(percent) / wanted.at(percent / 100) - 1
            for key, wanted in PUBLISHED[published].items()
            if key in self.quantiles
            for percent in PERCENTS
        }

    def table(self, published: str | None) -> Table:
        errors = {} if published is None else self.errors(published)
        table = Table(title=f"made{f' (error against {published})' if published else ''}")
        table.add_column("")
        for percent in PERCENTS:
            table.add_column(f"p{percent}", justify="right")
        for (request_class, what), quantiles in sorted(self.quantiles.items()):
            cells = []
            for percent in PERCENTS:
                error = errors.get((request_class, what, percent))
                cells.append(f"{quantiles.at(percent):,}" + ("" if error is None else f" ({error:+.1%})"))
            table.add_row(f"{request_class}: {what}", *cells)
        return table
