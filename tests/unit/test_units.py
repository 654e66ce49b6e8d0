"""Figures as people read them."""

from __future__ import annotations

from triptych.shared.units import duration, number, share


def test_units() -> None:
    texts = [duration(value) for value in (None, 0.0, 4.2e-9, 1.234e-5, 0.0009999, 0.0123, 0.99996, 1.5, 99.96, 12345.6)]
    assert texts == ["–", "0 s", "4.2 ns", "12.3 µs", "1 ms", "12.3 ms", "1 s", "1.5 s", "100 s", "12,346 s"]
    assert [number(value) for value in (None, 0, 0.1234, 12.0, 1234567)] == ["–", "0", "0.123", "12", "1,234,567"]
    shares = [share(value) for value in (None, 0.0, 0.00001, 0.5, 0.99999, 1.0)]
    assert shares == ["–", "0 %", "0.1 %", "50 %", "99.9 %", "100 %"]
