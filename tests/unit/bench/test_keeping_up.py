"""Whether a machine kept up with what it emulates: from two readings to a bar."""

from __future__ import annotations

import pytest

from triptych.loadgen.bench.keeping_up import MAX_LOST_SHARE, Effort, Reading, bar, figures
from triptych.shared.messages import InstanceId

ONE, TWO = InstanceId("one"), InstanceId("two")


def test_the_instance_that_is_worst_off_counts_and_only_what_was_lost_meanwhile() -> None:
    before = Reading(100.0, {ONE: 5.0}, {"router": 3.0})
    after = Reading(110.0, {ONE: 5.1, TWO: 0.4}, {"router": 8.0})
    effort = Effort.between(before, after)
    assert effort.lost_share == pytest.approx(0.04)
    assert effort.busy_cores == {"router": 0.5}


@pytest.mark.parametrize("is_kept_up", [True, False])
def test_one_replay_that_was_not_kept_up_with_is_enough(is_kept_up: bool) -> None:
    worst = MAX_LOST_SHARE + (-0.001 if is_kept_up else 0.001)
    efforts = [Effort(share, {"router": cores}) for share, cores in ((0.0, 0.3), (worst, 0.2))]
    found = {f"bursts_{name}.monolith": value for name, value in figures(efforts)}
    assert found == {"bursts_emulation_lost_share.monolith": worst, "bursts_busy_cores_router.monolith": 0.3}
    [held] = bar(found | {"day_emulation_lost_share.triptych": 0.0, "num_failed.triptych": 7.0}).values()
    assert held.holds is is_kept_up


def test_where_nothing_is_emulated_nothing_is_lost_and_nothing_said_of_it() -> None:
    effort = Effort.between(Reading(0.0, {}, {"router": 1.0}), Reading(10.0, {}, {"router": 2.0}))
    assert dict(figures([effort])) == {"busy_cores_router": 0.1}
