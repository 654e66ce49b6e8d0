"""Idle instances go to the group that a burst would hurt most; the result is the best that there is."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.policies.elastic.burst_tolerance import GroupShare, grants

shares = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.builds(GroupShare, st.integers(0, 12), st.floats(0, 9)), min_size=1
)


def after(shares: Mapping[str, GroupShare], given_to: Counter[str]) -> list[float]:
    """All tolerances, lowest first."""
    return sorted(GroupShare(share.num_instances + given_to[name], share.average).tolerance for name, share in shares.items())


def best_by_brute_force(shares: Mapping[str, GroupShare], num_idle: int) -> list[float]:
    """Of all ways to give out the idle instances the max-min one: highest lowest tolerance, then highest second lowest, ..."""
    ways = itertools.combinations_with_replacement(shares, num_idle)
    return max(after(shares, Counter(way)) for way in ways)


def test_bt_is_computed_anew_after_each_grant() -> None:
    granted = grants({"text": GroupShare(4, 2.0), "multimodal": GroupShare(2, 2.0)}, 5)
    assert [grant.group for grant in granted] == ["multimodal", "multimodal", "multimodal", "text", "multimodal"]
    assert granted[0].tolerances == {"text": 2.0, "multimodal": 1.0}
    assert granted[3].tolerances == {"text": 2.0, "multimodal": 2.5}


def test_nothing_is_granted_where_nobody_has_work() -> None:
    assert grants({"text": GroupShare(1, 0.0), "multimodal": GroupShare(0, 0.0)}, 3) == []
    assert [one.group for one in grants({"text": GroupShare(1, 0.0), "multimodal": GroupShare(5, 0.1)}, 2)] == [
        "multimodal"
    ] * 2
    assert GroupShare(3, 0.0).tolerance == math.inf


@pytest.mark.parametrize("seed", range(10))
def test_equal_to_brute_force_max_min(seed: int) -> None:
    """1,000 cases in all."""
    draw = random.Random(seed)
    for _ in range(100):
        # multiples of a quarter: equal tolerances are frequent, and exact
        cases = {name: GroupShare(draw.randint(0, 8), draw.randint(1, 24) / 4) for name in "abcd"[: draw.randint(1, 4)]}
        num_idle = draw.randint(0, 7)
        granted = grants(cases, num_idle)
        assert len(granted) == num_idle
        assert after(cases, Counter(grant.group for grant in granted)) == best_by_brute_force(cases, num_idle), cases


@given(shares, st.integers(0, 20))
def test_more_idle_instances_take_nothing_from_anybody(cases: dict[str, GroupShare], num_idle: int) -> None:
    assert grants(cases, num_idle) == grants(cases, num_idle + 1)[:num_idle]


@given(shares, st.integers(0, 20), st.sampled_from(["a", "b", "c", "d"]))
def test_more_work_gets_no_fewer_instances(cases: dict[str, GroupShare], num_idle: int, name: str) -> None:
    if name not in cases or not cases[name].num_instances:  # without any its tolerance is 0, whatever its work
        return
    busier = {**cases, name: GroupShare(cases[name].num_instances, 2 * cases[name].average + 0.5)}
    counts = [Counter(grant.group for grant in grants(each, num_idle))[name] for each in (cases, busier)]
    assert counts[0] <= counts[1]
