"""ElasticMM's strategy: shortages, idle instances first, gain against cost, groups, decode's growth and minimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.elastic_views import after, demand, demands, instance, instances, load, view
from triptych.shared.policies.elastic.actions import Decision, Switch
from triptych.shared.policies.elastic.emp import ElasticMMScaling
from triptych.shared.policies.elastic.hysteresis import Hysteresis
from triptych.shared.policies.elastic.strategy import NOTHING, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, Rates
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT

TEXT_RATES = Rates(requests=10, text_tokens=1000, output_tokens=1000)
IMAGE_RATES = Rates(requests=2, text_tokens=200, images=2, image_tokens=1000, output_tokens=200)
QUEUE = load("prefill", 8, 8000)  # 4 s for one instance


def decide(seen: ClusterView, strategy: ElasticMMScaling | None = None, memory: Memory = NOTHING) -> list[Decision]:
    return (strategy or ElasticMMScaling()).decide(seen, memory)[0]


def switches(decisions: list[Decision]) -> list[tuple[str, str, str]]:
    """Instance, roles, group."""
    each = [one.action for one in decisions]
    return [(one.instance_id, "+".join(sorted(one.roles)), one.group) for one in each if isinstance(one, Switch)]


def test_an_idle_instance_comes_first() -> None:
    group = [
        instance("p", "prefill", TEXT, QUEUE),
        instance("d1", "decode", TEXT, load("decode", 5, 5000)),
        instance("d2", "decode", TEXT),
    ]
    decisions = decide(view(group, demand(TEXT_RATES)))
    assert switches(decisions) == [("d2", "prefill", TEXT)]
    terms = decisions[0].terms
    assert terms["T_s"] == pytest.approx(4.0)
    assert terms["T_after_s"] == pytest.approx((4.0 + 0.5) / 2), "it helps when it has switched"
    assert terms["gain"] == pytest.approx(8 * 1.75 / 1000)
    assert terms["cost"] == 0.0


def busy_decoders(w_tokens: int = 20_000) -> list[ElasticInstance]:
    """Two that decode 40 sequences each, more than one of them could within the TBT target."""
    return [
        instance("d1", "decode", TEXT, load("decode", 40, w_tokens)),
        instance("d2", "decode", TEXT, load("decode", 40, w_tokens + 1000)),
    ]


def test_the_decode_instance_with_most_free_kv_is_taken_when_that_gains_more_than_it_costs() -> None:
    decisions = decide(view([instance("p", "prefill", TEXT, QUEUE), *busy_decoders()], demand(TEXT_RATES)))
    assert switches(decisions) == [], "migration alone costs more: 80 sequences, 0.2 s each, 100 tokens an output"
    queue = load("prefill", 100, 100_000)  # 50 s
    decisions = decide(view([instance("p", "prefill", TEXT, queue), *busy_decoders()], demand(TEXT_RATES)))
    assert switches(decisions) == [("d1", "prefill", TEXT)]
    terms = decisions[0].terms
    # by hand: T 50 s before, 25.25 s after; M 20,000 tokens of 10 us; L: a step of 50 ms + 1 ms a sequence, 40 then 80 of them,
    # for the 50 tokens that are to come
    assert terms["M_s"] == pytest.approx(0.2)
    assert terms["L_s"] == pytest.approx(50 * 0.04)
    assert terms["gain"] == pytest.approx(100 * 24.75 / 1000)
    assert terms["cost"] == pytest.approx(80 * (0.2 + 0.004 * 2.0) / 100)


def test_preemption_goes_on_while_it_pays_and_leaves_one() -> None:
    queue = load("prefill", 400, 400_000)
    group = [
        instance("p", "prefill", TEXT, queue),
        *busy_decoders(2000),
        instance("d3", "decode", TEXT, load("decode", 40, 900)),
    ]
    assert [name for name, _, _ in switches(decide(view(group, demand(TEXT_RATES))))] == ["d3", "d1"]


def test_nobody_is_taken_whose_kv_fits_nowhere() -> None:
    queue = load("prefill", 400, 400_000)
    group = [instance("p", "prefill", TEXT, queue), *busy_decoders(60_000)]
    assert switches(decide(view(group, demand(TEXT_RATES)))) == []


def test_an_instance_of_the_other_group_is_taken_when_there_is_none_in_the_own() -> None:
    text = [
        instance("p", "prefill", TEXT, load("prefill", 100, 100_000)),
        instance("d", "decode", TEXT, load("decode", 5, 500)),
    ]
    images = [
        instance("e1", "encoder", MULTIMODAL, load("encoder", 1, 100)),
        instance("e2", "encoder", MULTIMODAL, load("encoder", 2, 200)),
        instance("mp", "prefill", MULTIMODAL, load("prefill", 1, 10)),
        instance("md", "decode", MULTIMODAL, load("decode", 1, 10)),
    ]
    few = Rates(requests=0.5, text_tokens=50, images=0.5, image_tokens=500, output_tokens=50)
    decisions = decide(view([*text, *images], demand(TEXT_RATES), demand(few)))
    assert switches(decisions)[0] == ("e1", "prefill", TEXT), "the least affected one"
    assert "gains" in decisions[0].reason
    assert decisions[0].terms["its_T_after_s"] == pytest.approx(0.3)
    busy = view([*text, *images], demand(TEXT_RATES), demand(IMAGE_RATES))
    assert switches(decide(busy)) == [], "one encoder alone could not do what was lately asked of two"


def test_decode_grows_beyond_its_threshold_by_the_mirrored_rule() -> None:
    group = [
        instance("p1", "prefill", TEXT, load("prefill", 1, 100)),
        instance("p2", "prefill", TEXT, load("prefill", 2, 300)),
        instance("d", "decode", TEXT, load("decode", 60, 6000)),  # a step of 110 ms, the target is 100
    ]
    decisions = decide(view(group, demand(TEXT_RATES)))
    assert switches(decisions) == [("p1", "decode", TEXT)]
    assert decisions[0].terms["L_s"] == pytest.approx(-50 * 0.03)
    assert decisions[0].terms["gain"] == pytest.approx(60 * 0.004 * 1.5 / 100)
    calm = [*group[:2], instance("d", "decode", TEXT, load("decode", 30, 3000))]
    assert switches(decide(view(calm, demand(TEXT_RATES)))) == []
    full = [*group[:2], instance("d", "decode", TEXT, load("decode", 30, 95_000))]
    assert switches(decide(view(full, demand(TEXT_RATES)))) == [], (
        "its steps are in time, and more instances make them no shorter"
    )


def test_idle_instances_go_where_a_burst_would_hurt_most() -> None:
    text = [instance(f"t{index}", kind, TEXT) for index, kind in enumerate(("prefill", "prefill", "decode", "decode"))]
    images = [instance(f"m{index}", kind, MULTIMODAL) for index, kind in enumerate(("encoder", "prefill", "decode"))]
    heavy = Rates(requests=4, text_tokens=200, images=4, image_tokens=4000, output_tokens=200)
    decisions = decide(view([*text, *images], demand(Rates(1, 200, 0, 0, 50)), demand(heavy)))
    assert {group for _, _, group in switches(decisions)} == {MULTIMODAL}
    assert switches(decisions)[0][1] == "encoder", "its busiest stage"
    terms = decisions[0].terms
    assert terms["bt_text"] == pytest.approx(4 / (0.1 + 0.1))
    assert terms["bt_multimodal"] == pytest.approx(3 / (4.0 + 2.1 + 0.4))


def test_a_stage_without_an_instance_gets_one_in_addition() -> None:
    group = [instance("p", "prefill", TEXT, load("prefill", 1, 10))]
    assert switches(decide(view(group, demand(TEXT_RATES)))) == [("p", "decode+prefill", TEXT)]


def test_one_that_starts_serves_nobody_yet() -> None:
    """Its stage is covered until it is there, and given back then."""
    busy = load("prefill", 1, 10), load("decode", 1, 10)
    starting = replace(instance("d", "decode", TEXT), is_ready=False, is_starting=True, num_slots=0)
    assert switches(decide(view([instance("p", "prefill", TEXT), starting]))) == [("p", "decode+prefill", TEXT)]
    assert switches(decide(view([instance("b", "text", TEXT, *busy), starting]))) == [], "it goes on until then"
    there = instance("d", "decode", TEXT, busy[1])
    assert switches(decide(view([instance("b", "text", TEXT, *busy), there]))) == [("b", "prefill", TEXT)]


def test_where_encoding_is_a_part_of_prefill_both_roles_go_together() -> None:
    queue = (load("encoder", 10, 10_000), load("prefill", 1, 100))
    group = [
        instance("p", "prompt", MULTIMODAL, *queue),
        instance("d1", "decode", MULTIMODAL, load("decode", 5, 500)),
        instance("d2", "decode", MULTIMODAL),
    ]
    decisions = decide(view(group, images=demand(IMAGE_RATES)), ElasticMMScaling(is_coupled=True))
    assert switches(decisions) == [("d2", "encoder+prefill", MULTIMODAL)]
    assert decisions[0].terms["T_s"] == pytest.approx(10.05)


def test_dwell_and_budget_hold() -> None:
    strategy = ElasticMMScaling(hysteresis=Hysteresis(10.0, 1, 60.0))
    group = [
        instance("p", "prefill", TEXT, load("prefill", 80, 80_000)),
        *[instance(f"d{index}", "decode", TEXT, since_s=-100.0) for index in range(4)],
    ]
    decisions, memory = strategy.decide(view(group, demand(TEXT_RATES)), NOTHING)
    assert len(decisions) == 1
    assert switches(decide(view(group, demand(TEXT_RATES), now_s=59.0), strategy, memory)) == []
    assert len(decide(view(group, demand(TEXT_RATES), now_s=61.0), strategy, memory)) == 1
    fresh = [group[0], *[instance(f"d{index}", "decode", TEXT, since_s=-5.0) for index in range(4)]]
    assert switches(decide(view(fresh, demand(TEXT_RATES)))) == []


KINDS = ("encoder", "prefill", "decode", "instance", "prompt")


@given(st.one_of(instances((TEXT, MULTIMODAL), KINDS), instances((ANY,), KINDS)), demands, demands)
def test_no_stage_loses_its_last_instance(members: list[ElasticInstance], text: object, images: object) -> None:
    seen = view(members, text, images)  # type: ignore[arg-type]
    decisions = decide(seen)
    changed = [one.action.instance_id for one in decisions if isinstance(one.action, Switch)]
    assert len(changed) == len(set(changed)) == len(decisions), "one action for an instance"
    assert set(changed) <= {one.instance_id for one in members}
    left = after(seen, decisions, 1.0).instances
    for group in {one.group for one in members}:
        before = {role for one in members if one.group == group for role in one.roles}
        assert before <= {role for one in left if one.group == group for role in one.roles}
    assert all(one.roles for one in left)


@given(st.one_of(instances((TEXT, MULTIMODAL), KINDS), instances((ANY,), KINDS)), demands, demands)
def test_a_constant_load_settles(members: list[ElasticInstance], text: object, images: object) -> None:
    """What waits is served, the demand stays: after a while nothing is switched any more."""
    strategy, memory = ElasticMMScaling(), NOTHING
    seen = view(members, text, images)  # type: ignore[arg-type]
    for _ in range(60):
        decisions, memory = strategy.decide(seen, memory)
        seen = after(seen, decisions, 30.0)
    assert not strategy.decide(seen, memory)[0]


def test_equal_views_give_equal_decisions() -> None:
    group = [instance("p", "prefill", TEXT, QUEUE), *busy_decoders(), instance("d3", "decode", TEXT)]
    assert decide(view(group, demand(TEXT_RATES))) == decide(view(group, demand(TEXT_RATES)))
