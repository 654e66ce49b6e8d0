"""Bench autoscale's own arithmetic: what is promised of GPU-seconds; and the day that it replays."""

from __future__ import annotations

from triptych.loadgen.bench.autoscale import FULL, SIDES, TIDES, bars
from triptych.loadgen.synth.rows import workload_rows
from triptych.loadgen.synth.workload import load_workload

FOUND = {
    "attainment_own_scaled.triptych": 0.991,
    "attainment_own_scaled.monolith": 0.98,  # to our disadvantage, and no promise of ours
    "gpu_seconds.triptych": 600.0,
    "gpu_seconds.monolith": 800.0,
    "gpu_seconds.always_peak": 1100.0,
    "tides_emulation_lost_share.triptych": 0.01,
}


def broken(**more: float) -> set[str]:
    return {
        name
        for name, bar in bars(FOUND | {name.replace("__", "."): value for name, value in more.items()}).items()
        if not bar.holds
    }


def test_bars() -> None:
    assert broken() == set()
    assert broken(gpu_seconds__monolith=700.0) == {"gpu_seconds_to_monolith"}
    assert broken(gpu_seconds__always_peak=900.0) == {"gpu_seconds_to_always_peak"}
    assert broken(attainment_own_scaled__triptych=0.989) == {"attainment_triptych"}
    assert broken(tides_emulation_lost_share__monolith=0.5) == {"emulation_lost_share"}


def test_the_load_of_the_day_swings() -> None:
    """By pictures in a minute: a quiet night, and a surge."""
    pictures = [0] * 25
    for row in workload_rows(load_workload(TIDES)):
        pictures[int(row.arrival_s // 60)] += row.num_images
    assert FULL.parts[TIDES].duration_s == 1500.0
    assert max(pictures[:4]) < 60
    assert max(pictures) == max(pictures[10:14]) > 6 * max(pictures[:4])


def test_only_the_number_of_instances_differs_between_ours() -> None:
    ours, always = SIDES["triptych"], SIDES["always_peak"]
    assert ours.policy == always.policy
    assert ours.least < ours.start < always.least <= always.most <= ours.most
