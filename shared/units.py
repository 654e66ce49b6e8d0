"""Figures as people read them: three digits and a unit that fits, the same in every table and on every page."""

from __future__ import annotations

import re

NOTHING = "–"
# A terminal obeys some of them, and no page may hold them
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def duration(value_s: float | None) -> str:
    """12.3 ms, 1.5 s, 87 µs, 4 ns."""
    if value_s is None:
        return NOTHING
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value_s) * factor >= 0.9995:
            return f"{number(value_s * factor)} {unit}"
    return f"{number(value_s * 1e9)} ns" if value_s else "0 s"


def number(value: float | None) -> str:
    """Three digits, at least all before the point: 0.123, 12.3, 12,345."""
    if value is None:
        return NOTHING
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """99.5 %. Only all is 100 %, only none is 0 %."""
    if value is None:
        return NOTHING
    percent = 100 * value
    if value not in (0, 1):
        percent = min(99.9, max(0.1, percent))
    return f"{percent:.3g} %"


def plain(text: str) -> str:
    """The text without control characters, for texts that came from elsewhere."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
