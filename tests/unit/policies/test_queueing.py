"""Who is served first, and that everybody is served."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.policies.queueing import LATE_FACTOR, NO_TARGET_SLACK_S, by_slack, fcfs, overtaken_until_s


@dataclass(frozen=True)
class Item:
    name: str
    arrived_at_s: float
    slack_s: float | None
    work_s: float


def names(items: list[Item]) -> str:
    return "".join(item.name for item in items)


def test_fcfs_is_by_arrival() -> None:
    assert names(fcfs([Item("b", 2.0, 0.1, 1.0), Item("a", 1.0, None, 9.0)], 3.0)) == "ab"


def test_the_last_moment_to_begin_counts() -> None:
    early_big, late_small = Item("a", 0.0, 5.0, 0.5), Item("b", 1.0, 1.0, 0.1)
    assert names(by_slack([early_big, late_small], 1.0)) == "ba", "1.9 s before 4.5 s"
    assert names(by_slack([early_big, late_small, Item("c", 1.0, 5.0, 4.5)], 1.0)) == "cba", "large ones must begin earlier"


def test_who_is_late_makes_way_for_who_is_not() -> None:
    late, fresh = Item("a", 0.0, 1.0, 0.5), Item("b", 2.0, 1.0, 0.1)
    assert names(by_slack([late, fresh], 0.4)) == "ab"
    assert names(by_slack([late, fresh], 2.0)) == "ba"
    assert names(by_slack([late, Item("b", 3.9, 1.0, 0.1)], 3.9)) == "ab", "but not for ever"


def test_who_comes_late_makes_way_by_what_it_costs_others() -> None:
    for work_s, expected in ((0.01, "ab"), (0.5, "ba")):
        late = Item("a", 0.0, -1.0, work_s)
        assert names(by_slack([late, Item("b", 0.5, 1.5, 0.5)], 0.5)) == expected, "until 0.2 s, or 2 s; b begins at 1.5 s"


def test_without_targets_short_ones_go_first_for_a_time() -> None:
    document, follow_up = Item("d", 1.0, None, 2.0), Item("f", 2.0, None, 0.1)
    assert names(by_slack([document, follow_up], 3.0)) == "fd"
    assert names(by_slack([document, Item("f", 1.0 + 4 * 2.0 + 0.1, None, 0.0)], 10.0)) == "df"
    huge = Item("h", 1.0, None, 1000.0)
    assert names(by_slack([huge, Item("f", 1.0 + NO_TARGET_SLACK_S + 0.1, None, 0.0)], 12.0)) == "hf"
    assert names(by_slack([Item("b", 2.0, None, 1.0), Item("a", 1.0, None, 1.0)], 3.0)) == "ab", "equal ones in order"


items = st.builds(Item, st.just("x"), st.floats(0, 100), st.one_of(st.none(), st.floats(-10, 60)), st.floats(0, 100))


@given(items, items, st.floats(0, 1000))
def test_nothing_that_arrives_too_late_overtakes(first: Item, second: Item, later_s: float) -> None:
    """The bound: whatever the sizes, the targets and the time."""
    if second.arrived_at_s <= overtaken_until_s(first):
        return
    now_s = second.arrived_at_s + later_s
    assert by_slack([second, first], now_s) == [first, second]


def test_a_large_request_is_served_under_endless_overload() -> None:
    """One second of work for each second, all of it more urgent: the large one begins before its bound has passed by more than
    what was waiting then."""
    large = Item("large", 0.0, 3.0, 20.0)
    waiting, now_s, begun_at_s = [large], 0.0, None
    while begun_at_s is None and now_s < 100:
        arrived = [Item("small", now_s + 0.25 * i, 1.0, 0.5) for i in range(4)]  # two seconds of work for each second
        waiting = by_slack([*waiting, *arrived], now_s)
        served, now_s = waiting[:2], now_s + 1.0
        waiting = waiting[2:]
        if large in served:
            begun_at_s = now_s - 1.0
    assert begun_at_s is not None
    assert 3.0 < begun_at_s <= overtaken_until_s(large) + LATE_FACTOR * 1.0
