"""Our own strategy: counts that follow the load of minutes, overflow between plans, the number of instances."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from support.elastic_views import after, demand, demands, instance, instances, load, view
from triptych.shared.policies.elastic.actions import Switch
from triptych.shared.policies.elastic.planned_roles import KINDS, Planned
from triptych.shared.policies.elastic.staffing import Staffing
from triptych.shared.policies.elastic.strategy import NOTHING, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, GroupDemand, Limits, Rates
from triptych.shared.policies.groups import ANY
from triptych.shared.policies.placement import ROLES_OF

KIND_OF = {frozenset(roles): kind for kind, roles in ROLES_OF.items()}


def eight() -> list[ElasticInstance]:
    return [instance(f"i{index}", "instance" if index < 4 else "text") for index in range(8)]


def images(num: float) -> GroupDemand:
    """What keeps so many encoders busy."""
    return demand(Rates(requests=1, images=1, image_tokens=1000 * num))


def settled(cluster: ClusterView) -> tuple[ClusterView, Memory]:
    strategy, memory = Planned(), NOTHING
    for _ in range(20):
        decisions, memory = strategy.decide(cluster, memory)
        cluster = after(cluster, decisions, 30.0)
    return cluster, memory


def kinds(cluster: ClusterView) -> Counter[str]:
    return Counter(KIND_OF[one.roles] for one in cluster.instances)


@pytest.mark.parametrize(
    ("num", "expected"),
    [
        (0.0, {"instance": 1, "text": 7}),
        (1.0, {"instance": 2, "text": 6}),
        (1.6, {"encoder": 1, "instance": 2, "text": 5}),
        (3.2, {"encoder": 2, "instance": 3, "text": 3}),  # half an instance more or less of load moves nobody
    ],
)
def test_counts_follow_the_load(num: float, expected: dict[str, int]) -> None:
    cluster, memory = settled(view(eight(), images=images(num)))
    assert kinds(cluster) == expected
    assert Planned().decide(cluster, memory)[0] == []


def test_somebody_is_left_for_text() -> None:
    text = demand(Rates(requests=5, text_tokens=2000, output_tokens=500))
    overloaded = kinds(settled(view(eight(), text, images(50.0)))[0])
    assert overloaded["text"] >= 2, "decoding one instance's worth, with slack for as much"
    assert overloaded["encoder"] + overloaded["instance"] <= 6


def test_terms_and_words_say_why() -> None:
    decisions, _ = Planned().decide(view(eight(), images=images(1.0)), NOTHING)
    first = decisions[0]
    assert isinstance(first.action, Switch)
    assert first.reason == "planned for the load of minutes: 0 encoder, 2 instance, 6 text"
    assert first.terms["encoder_load"] == 1.0


def test_a_burst_overflows_between_plans() -> None:
    planned = settled(view(eight(), images=images(1.0)))
    strategy = Planned()
    queue = load("encoder", 40, 40_000)
    busy = [
        instance(one.instance_id, KIND_OF[one.roles], ANY, queue) if "encoder" in one.roles else one
        for one in planned[0].instances
    ]
    cluster = view(busy, images=images(1.0), now_s=planned[0].now_s - 25.0)  # the next plan is not due yet
    decisions, _ = strategy.decide(cluster, planned[1])
    actions = [one.action for one in decisions]
    assert actions
    assert all(isinstance(one, Switch) and one.roles == set(ROLES_OF["instance"]) for one in actions), "a role in addition"
    assert len(actions) <= strategy.hysteresis.max_switches
    assert decisions[0].terms["gain"] > decisions[0].terms["cost"]


def test_where_their_number_may_change_pictures_are_kept_apart() -> None:
    cluster = view(eight(), demand(Rates(10, 3000, 0, 0, 1000)), images(1.0), limits=Limits(2, 20))
    assert Planned().decide(cluster, NOTHING) == Staffing().decide(cluster, NOTHING)


SOME = instances((ANY,), KINDS)


@given(SOME, demands, demands)
def test_no_stage_loses_its_last_instance(members: list[ElasticInstance], text: GroupDemand, pictures: GroupDemand) -> None:
    cluster = view(members, text, pictures)
    decisions, _ = Planned().decide(cluster, NOTHING)
    switched = [one.action.instance_id for one in decisions if isinstance(one.action, Switch)]
    assert len(switched) == len(set(switched))
    before = {role for one in members for role in one.roles}
    assert before <= {role for one in after(cluster, decisions, 1.0).instances for role in one.roles}


@given(SOME, demands, demands)
def test_a_constant_load_settles(members: list[ElasticInstance], text: GroupDemand, pictures: GroupDemand) -> None:
    cluster, memory = settled(view(members, text, pictures))
    assert not Planned().decide(cluster, memory)[0]
