"""Charts: axes hold what is drawn, whatever its range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.charts import linear_axis, log_axis
from triptych.shared.units import duration, number


@given(st.floats(1e-6, 1e6), st.floats(1, 1e6))
def test_axes_hold_their_values_and_have_few_ticks(low: float, factor: float) -> None:
    high = low * factor
    for axis in (log_axis([low, high], duration), linear_axis(high, number), linear_axis(high, number, is_exact=True)):
        assert axis.low <= low * (1 + 1e-9)
        assert axis.high >= high * (1 - 1e-9)
        assert 1 <= len(axis.ticks) <= 14
        assert all(0 <= axis.place(value) <= 1 for value in (low, high, *(tick for tick, _ in axis.ticks)))
