"""Bench elastic's own arithmetic: what a decision log says of switches, and what is promised."""

from __future__ import annotations

from typing import Any

from triptych.loadgen.bench.elastic import DAY, MIN_RATIOS, SPLITS, STEADY, Moves, bars


def switch(seconds: int, target: str, to: str, **more: Any) -> dict[str, Any]:
    entry = {"action": "switch", "result": "done", "at": f"2026-01-02T03:04:{seconds:02}.000+00:00", "target": target, "to": to}
    return {**entry, "reason": "why", "terms": {"gain": 1.0}, **more}


def test_switches_are_counted_and_those_taken_back_soon() -> None:
    log = [
        switch(0, "a", "prefill"),
        switch(1, "b", "prefill"),
        switch(2, "a", "decode"),
        switch(5, "a", "prefill"),  # 5 s after the first: to and fro
        switch(30, "a", "decode"),  # 28 s: not so soon
        switch(31, "b", "decode"),
        switch(32, "c", "encoder", result="failed"),
        switch(33, "c", "encoder", reason=""),
        {"action": "advise", "result": "advised"},
    ]
    assert Moves.of(log, time_scale=1.0) == Moves(num_switches=7, num_unexplained=1, num_returns=2)
    assert Moves.of(log, time_scale=4.0).num_returns == 1, "modelled seconds"


def test_bars_compare_with_the_best_split() -> None:
    figures: dict[str, float] = {
        f"num_switches_{what}.{policy}": 0.0 for what in ("unexplained", "taken_back") for policy in MIN_RATIOS
    }
    for workload in (DAY, STEADY):
        goodput = f"{workload}_goodput_own_scaled_per_s"
        figures |= {f"{goodput}.{split}": 1.0 + place for place, split in enumerate(SPLITS)}
        figures |= {f"{goodput}.elasticmm": 3.66, f"{goodput}.triptych": 4.44 if workload == DAY else 3.0}
    made = bars(figures)
    assert {name for name, bar in made.items() if not bar.holds} == {"day_goodput_triptych_to_best_split"}
    assert bars(figures | {"num_switches_taken_back.elasticmm": 1.0})["num_switches_taken_back_elasticmm"].holds is False
