"""What a benchmark found: figures and bars, as a table for people and as one JSON object on the last line for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from triptych.shared.units import number


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise about one figure: value is to be at least `limit`, or at most, with is_most."""

    value: float
    limit: float
    is_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.is_most else self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    """figures: by name, ROW.SIDE where several sides have the same figure (the table shows a row with a column for each).
    conditions: anything of JSON that a reader has to know to judge the figures."""

    bench: str
    conditions: Mapping[str, object]
    figures: Mapping[str, float]
    bars: Mapping[str, Bar] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(bar.holds for bar in self.bars.values())

    def to_json(self) -> str:
        """One line."""
        bars = {name: {"value": _rounded(bar.value), "limit": bar.limit, "holds": bar.holds} for name, bar in self.bars.items()}
        figures = {name: _rounded(value) for name, value in self.figures.items()}
        return json.dumps({"bench": self.bench, "conditions": self.conditions, "figures": figures, "bars": bars})

    def print(self, console: Console) -> None:
        """Figures, bars, and under which conditions."""
        for table in _figure_tables(self.figures):
            console.print(table)
        if self.bars:
            console.print(_bar_table(self.bars))
        shown = {name: value for name, value in self.conditions.items() if not isinstance(value, dict)}
        conditions = ", ".join(f"{name} {value}" for name, value in shown.items())
        console.print(conditions, style="dim", markup=False, highlight=False, soft_wrap=True)


def _figure_tables(figures: Mapping[str, float]) -> Iterator[Table]:
    """One for each set of sides: rows with the same columns stand together."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        row, _, side = name.partition(".")
        rows.setdefault(row, {})[side] = value
    for sides in dict.fromkeys(tuple(by_side) for by_side in rows.values()):
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("figure", no_wrap=True)
        for side in sides:
            table.add_column(side or "value", justify="right", no_wrap=True)
        for name, by_side in rows.items():
            if tuple(by_side) == sides:
                table.add_row(name, *map(number, by_side.values()))
        yield table


def _bar_table(bars: Mapping[str, Bar]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("bar", no_wrap=True)
    for name in ("value", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for name, bar in bars.items():
        limit = f"{'at most' if bar.is_most else 'at least'} {number(bar.limit)}"
        table.add_row(name, number(bar.value), limit, "[green]holds[/]" if bar.holds else "[red]does not hold[/]")
    return table


def _rounded(value: float) -> float:
    """Four digits: more are noise."""
    return float(f"{value:.4g}")
