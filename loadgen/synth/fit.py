"""What a made trace came to, by class, and how far its percentiles are from the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.table import Table

from triptych.loadgen.report.histogram import Histogram
from triptych.loadgen.synth.published import COUNTS, SIZES
from triptych.loadgen.synth.tables import Counts, Sizes
from triptych.loadgen.traces.row import TraceRow

PERCENTS = (10, 50, 90, 95, 99)
PUBLISHED: Mapping[str, Mapping[tuple[str, str], Sizes | Counts]] = {
    "azure-lmm": {
        ("text", "context tokens"): Sizes(SIZES["azure-lmm-text-context"]),
        ("text", "output tokens"): Sizes(SIZES["azure-lmm-text-generated"]),
        ("image", "context tokens"): Sizes(SIZES["azure-lmm-image-context"]),
        ("image", "output tokens"): Sizes(SIZES["azure-lmm-image-generated"]),
        ("image", "pictures"): Counts(COUNTS["azure-lmm"]),
    }
}


@dataclass(slots=True)
class Made:
    """Counts rows as they pass. sizes: by class and what is counted."""

    num_rows: int = 0
    num_image_rows: int = 0
    has_more_than_azure: bool = False
    sizes: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def counted(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        for row in rows:
            self.num_rows += 1
            self.num_image_rows += row.num_images > 0
            self.has_more_than_azure |= row.session is not None or row.num_image_tokens is not None
            self._add(row, "context tokens", row.num_context_tokens)
            self._add(row, "output tokens", row.num_output_tokens)
            if row.num_images:
                self._add(row, "pictures", row.num_images)
            yield row

    def _add(self, row: TraceRow, what: str, value: int) -> None:
        self.sizes.setdefault((row.request_class, what), Histogram()).add(value)

    def percentiles(self, request_class: str, what: str) -> list[int]:
        """At PERCENTS."""
        return [round(size) for size in self.sizes[request_class, what].percentiles(PERCENTS)]

    def errors(self, published: str) -> dict[tuple[str, str, int], float]:
        """(class, what, percent) -> made relative to published, less 1."""
        return {
            (*key, percent): made / wanted.at(percent / 100) - 1
            for key, wanted in PUBLISHED[published].items()
            if key in self.sizes
            for percent, made in zip(PERCENTS, self.percentiles(*key), strict=True)
        }

    def table(self, published: str | None) -> Table:
        errors = {} if published is None else self.errors(published)
        table = Table(title=f"made{f' (error against {published})' if published else ''}")
        table.add_column("")
        for percent in PERCENTS:
            table.add_column(f"p{percent}", justify="right")
        for key in sorted(self.sizes):
            cells = []
            for percent, made in zip(PERCENTS, self.percentiles(*key), strict=True):
                error = errors.get((*key, percent))
                cells.append(f"{made:,}" + ("" if error is None else f" ({error:+.1%})"))
            table.add_row(": ".join(key), *cells)
        return table
