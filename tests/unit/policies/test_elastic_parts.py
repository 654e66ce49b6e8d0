"""Needs, costs, hysteresis and replicas: what all elastic strategies are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.elastic_views import COSTS, demand, instance, load, view
from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.messages import InstanceId
from triptych.shared.policies.elastic.actions import Action, Advise, Drain, Launch, Wanted
from triptych.shared.policies.elastic.autoscale import replicas
from triptych.shared.policies.elastic.costs import costs_of, measured_costs
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.needs import expected, needed, rates_of
from triptych.shared.policies.elastic.replicas import Target, scaled
from triptych.shared.policies.elastic.staffing import staffed
from triptych.shared.policies.elastic.strategy import NOTHING, Memory
from triptych.shared.policies.elastic.views import ElasticInstance, GroupDemand, Limits, Rates
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT

TEXT_RATES = Rates(requests=10, text_tokens=3000, output_tokens=1000)
IMAGE_RATES = Rates(requests=2, text_tokens=200, images=4, image_tokens=1800, output_tokens=100)


def test_needs_are_token_rates_over_capacities() -> None:
    assert needed(TEXT_RATES, COSTS) == {"encoder": 0.0, "prefill": 1.5, "decode": 2.0}
    assert needed(IMAGE_RATES, COSTS) == {"encoder": 1.8, "prefill": 1.0, "decode": 0.2}
    seen = view([], demand(TEXT_RATES), demand(IMAGE_RATES))
    assert rates_of(seen, TEXT) == TEXT_RATES
    assert rates_of(seen, MULTIMODAL) == IMAGE_RATES
    assert rates_of(seen, ANY) == Rates(12, 3200, 4, 1800, 1100)


def test_a_burst_of_images_per_request_is_expected_although_requests_are_few() -> None:
    now = Rates(requests=2, text_tokens=200, images=2, image_tokens=900, output_tokens=100)
    seen = GroupDemand(average=now, recent=now, peak_images_per_request=5.0)
    assert expected(seen).images == 10.0
    assert expected(seen).image_tokens == pytest.approx(4500.0)
    assert expected(demand(now)) == now, "steady: what it is"


@pytest.mark.parametrize("model", ["qwen2.5-vl-7b", "llama-3.2-11b", "internvl2.5-26b"])
def test_costs_of_a_cost_model(model: str) -> None:
    cost = published_cost_model("a100", model)
    costs = costs_of(cost, cost.unknowns.rdma)
    image = cost.image(896, 896)
    slots = 1601 if model == "llama-3.2-11b" else image.num_tokens  # cross-attention: a quarter, by its KV
    assert costs.capacity["encoder"] == pytest.approx(slots / cost.encode_s([image]), rel=0.01)
    assert costs.encode.token_s * slots == pytest.approx(cost.encode_s([image]) - costs.encode.fixed_s, rel=0.05)
    assert costs.capacity["decode"] > costs.capacity["prefill"] / 20
    assert costs.image_weight == (1.0 if model != "llama-3.2-11b" else pytest.approx(cost.image_kv_share * 4, rel=0.01))
    assert costs.kv.transfer_s(2000) == pytest.approx(cost.transfer_s(cost.kv_bytes(2000), "rdma"))
    assert costs.startup_s == cost.startup_s


def test_costs_without_a_cost_model_are_what_instances_measure() -> None:
    def at(name: str, **rates: float) -> ElasticInstance:
        from_load = [load(role, 4, 100) for role in ("encoder", "prefill", "decode")]
        loads = tuple(type(one)(one.stage, 0, 4, 100, rates.get(one.stage, 0.0)) for one in from_load)
        return ElasticInstance(InstanceId(name), frozenset(("encoder", "prefill", "decode")), ANY, loads)

    costs = measured_costs([at("a", encoder=500.0, decode=200.0), at("b", encoder=700.0), at("c", encoder=900.0)])
    assert costs.capacity["encoder"] == 700.0
    assert costs.decode.fixed_s == pytest.approx(4 / 200)
    assert costs.capacity["prefill"] == 1000.0, "nobody has measured it yet"
    later = measured_costs([at("a", prefill=2000.0)], costs)
    assert (later.capacity["encoder"], later.capacity["prefill"]) == (700.0, 2000.0)
    assert later.decode.fixed_s == pytest.approx(4 / 200)


def test_the_budget_is_of_a_window_and_dwell_of_an_instance() -> None:
    rule = Hysteresis(dwell_s=10.0, max_switches=3, window_s=60.0)
    memory = rule.spend(rule.spend(NOTHING, 0.0, 1), 30.0, 2)
    assert rule.num_left(memory, 59.0) == 0
    assert rule.num_left(memory, 60.0) == 1
    assert rule.num_left(memory, 90.0) == 3
    assert len(rule.spend(memory, 1000.0, 1).switched_at_s) == 1, "what is over is forgotten"
    one = instance("a", "text", since_s=5.0)
    assert not rule.may_switch(one, 14.0)
    assert rule.may_switch(one, 15.0)
    assert not rule.may_switch(ElasticInstance(one.instance_id, one.roles, is_ready=False), 1e9)


@pytest.mark.parametrize(
    ("load", "share", "expected"), [(0.0, 0.8, 1), (0.8, 0.8, 1), (0.81, 0.8, 2), (3.2, 0.8, 4), (3.2, 1.0, 4), (3.0, 1.0, 3)]
)
def test_replicas_are_rounded_up(load: float, share: float, expected: int) -> None:
    assert replicas(load, share) == expected


def test_square_root_staffing() -> None:
    assert [staffed(load, 1.0) for load in (0.0, 0.25, 1.0, 4.0, 9.0, 100.0)] == [0, 1, 2, 6, 12, 110]


@given(st.floats(0, 100), st.floats(0, 10), st.floats(0, 3))
def test_staffing_is_monotone_and_covers_the_load(load: float, more: float, slack: float) -> None:
    assert staffed(load, slack) >= load - 1e-6
    assert staffed(load + more, slack) >= staffed(load, slack)


def test_launches_come_at_once_and_to_who_lacks_most() -> None:
    seen = view([instance("e", "encoder"), instance("t", "text")], limits=Limits(1, 4))
    targets = [Target("encoder", 2, {"M_L/M_C": 1.7}), Target("text", 3, {}, group="")]
    decisions, memory = scaled(seen, NOTHING, targets, 60.0, "why")
    assert isinstance(decisions[0].action, Advise)
    launches = [one.action for one in decisions[1:]]
    assert launches == [Launch("text", ANY, 1), Launch("encoder", ANY, 1)], "the limit is 4: in turn"
    again, memory = scaled(seen, memory, targets, 60.0, "why")
    assert not any(isinstance(one.action, Advise) for one in again), "it is no news"


def test_launches_are_for_the_group_of_their_target() -> None:
    mine, theirs = instance("t", "text", TEXT), instance("m", "text", MULTIMODAL)
    targets = [Target("text", 1, {}, group=TEXT), Target("text", 3, {}, group=MULTIMODAL)]
    decisions, _ = scaled(view([mine, theirs], limits=Limits(1, 9)), NOTHING, targets, 60.0, "why")
    assert [one.action for one in decisions[1:]] == [Launch("text", MULTIMODAL, 2)]


def test_drains_leave_what_was_wanted_of_late() -> None:
    """In the cooldown and the time of a start, 90 s in all; at first what was there counts as wanted."""
    large = [instance(f"t{index}", "text", ANY, load("decode", 9 - index, 100)) for index in range(4)]

    def leaving(now_s: float, wanted: int, memory: Memory, may_drain: bool = True) -> tuple[list[Action], Memory]:
        seen = view([*large, instance("e", "encoder")], now_s=now_s, limits=Limits(2, 5))
        targets = [Target("encoder", 1, {}), Target("text", wanted, {}, may_drain)]
        decisions, memory = scaled(seen, memory, targets, 60.0, "why")
        return [one.action for one in decisions if isinstance(one.action, Drain)], memory

    drained, memory = leaving(0.0, 1, NOTHING)
    assert drained == []
    drained, memory = leaving(40.0, 3, memory)
    assert drained == []
    assert leaving(89.0, 1, memory)[0] == []
    assert leaving(90.0, 1, memory, may_drain=False)[0] == []
    drained, memory = leaving(90.0, 1, memory)
    assert drained == [Drain(InstanceId("t3"))], "three were wanted 50 s ago"
    assert leaving(130.0, 1, memory)[0] == [Drain(InstanceId(name)) for name in ("t3", "t2", "t1")], "the least busy ones"


def test_advice_is_what_there_is_to_be() -> None:
    """Within the limits, and no fewer before those that are too many may go: whoever follows it does so at once."""
    members = [instance("e", "encoder"), *[instance(f"t{index}", "text") for index in range(3)]]

    def advised(now_s: float, encoders: int, texts: int, memory: Memory) -> tuple[list[tuple[Wanted, ...]], Memory]:
        targets = [Target("encoder", encoders, {}), Target("text", texts, {})]
        decisions, memory = scaled(view(members, now_s=now_s, limits=Limits(2, 5)), memory, targets, 60.0, "why")
        return [one.action.wanted for one in decisions if isinstance(one.action, Advise)], memory

    many, memory = advised(0.0, 9, 1, NOTHING)
    assert many == [(Wanted("encoder", ANY, 2), Wanted("text", ANY, 3))], "the limit is 5, and three texts are held"
    assert advised(50.0, 9, 1, memory)[0] == []
    assert advised(90.0, 9, 1, memory)[0] == [(Wanted("encoder", ANY, 2), Wanted("text", ANY, 1))]


counts = st.integers(1, 8)


@given(counts, counts, counts, counts, st.integers(1, 8), st.integers(0, 8))
def test_scaling_stays_within_the_limits(
    encoders: int, texts: int, want_encoders: int, want_texts: int, least: int, room: int
) -> None:
    members = [instance(f"e{index}", "encoder") for index in range(encoders)]
    members += [instance(f"t{index}", "text") for index in range(texts)]
    limits = Limits(min(least, len(members)), max(len(members), least) + room)
    targets = [Target("encoder", want_encoders, {}), Target("text", want_texts, {})]
    decisions, _ = scaled(view(members, limits=limits), NOTHING, targets, 60.0, "why")
    change = sum(one.action.count for one in decisions if isinstance(one.action, Launch))
    change -= sum(isinstance(one.action, Drain) for one in decisions)
    assert limits.min_instances <= len(members) + change <= limits.max_instances
    if limits.min_instances == limits.max_instances:
        assert change == 0
