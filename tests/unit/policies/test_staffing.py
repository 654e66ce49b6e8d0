"""Staffing: pools as large as their work needs, instances that move before others are started, limits that are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.elastic_views import after, demand, demands, instance, instances, view
from triptych.shared.messages import InstanceId
from triptych.shared.policies.elastic.actions import Action, Advise, Drain, Launch, Switch, Wanted
from triptych.shared.policies.elastic.staffing import APART, SHARED, WHOLE, Staffing
from triptych.shared.policies.elastic.strategy import NOTHING, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, GroupDemand, Limits, Rates
from triptych.shared.policies.groups import ANY, GROUPS, MULTIMODAL, TEXT
from triptych.shared.policies.placement import ROLES_OF

TEXT_RATES = Rates(requests=10, text_tokens=200, output_tokens=195)  # 0.1 instances prefill, 0.39 decode
IMAGE_RATES = Rates(requests=1, images=2, image_tokens=1000, text_tokens=1000, output_tokens=5)  # 1 encodes, 1 prefills
STARTED_S = 30.0  # COSTS.startup_s
STRATEGY = Staffing(pools=(replace(APART[0], slack=1.0), replace(APART[1], slack=2.0)), cooldown_s=30.0)


def prompts(num: int, since_s: float = -1000.0) -> list[ElasticInstance]:
    return [instance(f"p{index}", "prompt", MULTIMODAL, since_s=since_s) for index in range(num)]


def texts(num: int) -> list[ElasticInstance]:
    return [instance(f"t{index}", "text", TEXT) for index in range(num)]


def seen(members: list[ElasticInstance], images: Rates = IMAGE_RATES, now_s: float = 0.0, most: int = 20) -> ClusterView:
    return view(members, demand(TEXT_RATES), demand(images), now_s=now_s, limits=Limits(2, most))


def actions(cluster: ClusterView, memory: Memory = NOTHING) -> list[Action]:
    """Without advice."""
    return [one.action for one in STRATEGY.decide(cluster, memory)[0] if not isinstance(one.action, Advise)]


def test_each_pool_has_head_room_by_the_square_root_of_its_load() -> None:
    decisions, _ = STRATEGY.decide(seen([*prompts(1), *texts(1)]), NOTHING)
    assert [one.action for one in decisions] == [
        Advise((Wanted("prompt", MULTIMODAL, 4), Wanted("text", TEXT, 2))),  # 2 + sqrt(2); 0.5 + 2 * sqrt(0.5)
        Launch("prompt", MULTIMODAL, 3),
        Launch("text", TEXT, 1),
    ]
    assert decisions[1].terms["M_L/M_C"] == pytest.approx(2.0)
    assert actions(seen([*prompts(4), *texts(2)])) == []


def test_a_pool_that_has_lost_all_gets_one_of_those_that_are_needed_elsewhere() -> None:
    """Without it nobody would decode until another one has started."""
    _, memory = STRATEGY.decide(seen([*prompts(4), *texts(2)]), NOTHING)
    switches = [one for one in actions(seen(prompts(4), now_s=5.0), memory) if isinstance(one, Switch)]
    assert switches == [Switch(InstanceId("p0"), frozenset(ROLES_OF["text"]), TEXT)]
    assert not [one for one in actions(seen(prompts(1), now_s=5.0), memory) if isinstance(one, Switch)], "nor the last one"


def test_instances_of_no_pool_join_one() -> None:
    cluster = seen([instance("i0", "instance"), instance("i1", "instance"), instance("t0", "text")])
    switches = [one for one in actions(cluster) if isinstance(one, Switch)]
    assert [one.instance_id for one in switches] == ["i0", "i1", "t0"]
    assert {(one.roles, one.group) for one in switches} == {
        (frozenset(ROLES_OF["prompt"]), MULTIMODAL),
        (frozenset(ROLES_OF["text"]), TEXT),
    }
    new = seen([instance("i0", "instance", since_s=-1.0), instance("t0", "text", since_s=-1.0)])
    assert actions(new) == [], "not at once, and none is started before"
    alone = seen([instance("i0", "instance")])
    assert {type(one) for one in actions(alone)} == {Launch}, "somebody has to do everything until others are there"


def test_what_one_pool_has_too_much_of_goes_to_the_other_at_once() -> None:
    _, memory = STRATEGY.decide(seen([*prompts(4), *texts(4)]), NOTHING)
    for now_s, kinds in ((50.0, [Launch]), (61.0, [Switch, Switch, Advise])):
        decisions, memory = STRATEGY.decide(seen([*prompts(2), *texts(4)], now_s=now_s), memory)
        assert [type(one.action) for one in decisions] == kinds, "four texts count as wanted for 60 s"
    assert all(isinstance(one.action, Switch) and one.action.group == MULTIMODAL for one in decisions[:2])
    assert [type(one) for one in actions(seen([*prompts(2), *texts(2)], now_s=61.0), memory)] == [Launch], "none to spare"


def test_late_requests_bring_one_more() -> None:
    late = view([*prompts(4), *texts(2)], demand(TEXT_RATES, 0.9), demand(IMAGE_RATES, 1.0), limits=Limits(2, 20))
    assert actions(late) == [Launch("text", TEXT, 1)]
    few = replace(late.demand[TEXT], num_ended=5)
    assert actions(replace(late, demand={**late.demand, TEXT: few})) == [], "five requests say nothing"


def test_fewer_only_after_a_while() -> None:
    quiet, many = Rates(requests=0.1, image_tokens=100), [*prompts(4), *texts(2)]
    _, memory = STRATEGY.decide(seen(many), NOTHING)
    for now_s in (10.0, 30.0, 55.0):
        decisions, memory = STRATEGY.decide(seen(many, quiet, now_s), memory)
        assert not any(isinstance(one.action, Drain) for one in decisions)
    assert actions(seen(many, quiet, 65.0), memory) == [Drain(InstanceId(name)) for name in ("p0", "p1", "p2")]


def fixed(num_prompts: int, num_texts: int, text: float, pictures: float) -> ClusterView:
    """text, pictures: how many instances they keep busy; a token of a picture takes 1.5 ms, encoded and prefilled."""
    members = [instance(f"p{index}", "prompt") for index in range(num_prompts)]
    rates = Rates(requests=1, text_tokens=2000 * text), Rates(requests=1, image_tokens=1000 * pictures / 1.5)
    return view([*members, *texts(num_texts)], *map(demand, rates))


@pytest.mark.parametrize(
    ("num_prompts", "text", "pictures", "expected"),
    [
        (6, 0.0, 0.0, 6),  # nobody moves for nothing
        (6, 0.25, 0.8, 6),
        (6, 0.25, 6.0, 7),
        (6, 1.4, 0.8, 5),
        (4, 0.25, 0.8, 4),  # as much as there is to do may come
        (6, 6.0, 0.8, 1),
        (6, 8.0, 8.0, 3),  # more than there are for: both lack head-room alike
        (1, 1.0, 1.0, 3),
    ],
)
def test_a_fixed_pool_is_divided_by_who_lacks_head_room(num_prompts: int, text: float, pictures: float, expected: int) -> None:
    cluster, memory, strategy = fixed(num_prompts, 8 - num_prompts, text, pictures), NOTHING, Staffing()
    decisions, memory = strategy.decide(cluster, memory)
    assert {type(one.action) for one in decisions} <= {Advise, Switch}
    cluster = after(cluster, decisions, 60.0)
    assert [kind_of(one) for one in cluster.instances].count("prompt") == expected
    assert not strategy.decide(cluster, memory)[0]


@given(st.integers(2, 12), st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=6))
def test_a_fixed_pool_serves_everybody_and_settles(num_instances: int, loads: list[tuple[float, float]]) -> None:
    members = [instance(f"i{index}", "instance") for index in range(num_instances)]
    cluster, memory, strategy = view(members), NOTHING, Staffing()
    for text, pictures in loads:
        cluster = replace(cluster, demand=fixed(1, 1, text, pictures).demand)
        for _ in range(4):
            decisions, memory = strategy.decide(cluster, memory)
            cluster = after(cluster, decisions, 60.0)
        assert not [one for one in strategy.decide(cluster, memory)[0] if isinstance(one.action, Switch)]
        assert {(kind_of(one), one.group) for one in cluster.instances} == {(pool.kind, pool.group) for pool in SHARED}


SOME = instances((ANY, *GROUPS), ("prompt", "text", "instance"))


@given(SOME, st.lists(st.tuples(demands, demands), min_size=1, max_size=12), st.integers(2, 8), st.integers(1, 8))
def test_limits_and_the_hold_are_kept_whatever_comes(
    members: list[ElasticInstance], loads: list[tuple[GroupDemand, GroupDemand]], least: int, room: int
) -> None:
    """With actions that are done before the next look, every 20 s."""
    limits = Limits(least, max(least, len(members)) + room)
    for strategy in (STRATEGY, Staffing(pools=WHOLE)):
        cluster, memory = view(members, limits=limits), NOTHING
        wanted: list[tuple[float, dict[str, int]]] = []
        for text, pictures in loads:
            cluster = replace(cluster, demand={TEXT: text, MULTIMODAL: pictures})
            decisions, memory = strategy.decide(cluster, memory)
            touched = [one.action.instance_id for one in decisions if isinstance(one.action, Switch | Drain)]
            assert len(touched) == len(set(touched))
            wanted.append((cluster.now_s, {one.kind: one.count for one in memory.wanted[-1][1]} if memory.wanted else {}))
            held_s = strategy.cooldown_s + STARTED_S
            later = after(cluster, decisions, 20.0)
            gone = {one.action.instance_id for one in decisions if isinstance(one.action, Drain)}
            for pool in strategy.pools if any(isinstance(one.action, Drain) for one in decisions) else ():
                drained = [one for one in cluster.instances if one.instance_id in gone and pool.kind == kind_of(one)]
                most = max(counts[pool.kind] for at_s, counts in wanted if cluster.now_s - at_s < held_s)
                left = sum(pool.kind == kind_of(one) for one in later.instances)
                assert not drained or left >= most
            cluster = later
            assert len(cluster.instances) <= limits.max_instances
            assert len(cluster.instances) >= limits.min_instances or not memory.wanted, "or they have yet to join"
        assert len(memory.wanted) <= held_s / 20.0 + 2


def kind_of(one: ElasticInstance) -> str:
    return next(kind for kind, roles in ROLES_OF.items() if set(roles) == one.roles)


@given(SOME, demands, demands)
def test_a_constant_load_settles(members: list[ElasticInstance], text: GroupDemand, pictures: GroupDemand) -> None:
    cluster, memory = view(members, text, pictures, limits=Limits(2, 1000)), NOTHING
    for _ in range(12):
        decisions, memory = STRATEGY.decide(cluster, memory)
        cluster = after(cluster, decisions, 60.0)
    assert STRATEGY.decide(cluster, memory)[0] == []
    assert {kind_of(one) for one in cluster.instances} == {"prompt", "text"}


@given(demands, st.floats(1.0, 3.0))
def test_more_work_never_wants_fewer(load: GroupDemand, factor: float) -> None:
    def wanted(rates: Rates) -> list[int]:
        cluster = view([*prompts(1), *texts(1)], demand(rates), demand(rates), limits=Limits(2, 500))
        advice = STRATEGY.decide(cluster, NOTHING)[0][0].action
        assert isinstance(advice, Advise)
        return [one.count for one in advice.wanted]

    more = Rates(*(factor * getattr(load.now, name) for name in Rates.__slots__))
    assert all(few <= many for few, many in zip(wanted(load.now), wanted(more), strict=True))
