"""When an ended process is started again: at once, then later and later, but always."""

from __future__ import annotations

from triptych.shared.policies.restart import MAX_DELAY_S, WINDOW_S, decide_restart


def test_a_drained_process_stays_ended() -> None:
    assert decide_restart(True, [], 0.0).delay_s is None
    assert decide_restart(True, [1.0, 2.0], 2.0).delay_s is None


def test_the_first_crash_is_repaired_at_once() -> None:
    assert decide_restart(False, [5.0], 5.0).delay_s == 0.0


def test_delays_double_up_to_the_bound_and_never_end() -> None:
    delays = [decide_restart(False, [float(i) for i in range(num)], float(num)).delay_s for num in range(1, 40)]
    assert delays[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(delays[6:]) == {MAX_DELAY_S}


def test_old_crashes_are_forgotten() -> None:
    crashes_s = [0.0, 1.0, 2.0, 2.0 + WINDOW_S]
    assert decide_restart(False, crashes_s, 2.0 + WINDOW_S).delay_s == 0.0
