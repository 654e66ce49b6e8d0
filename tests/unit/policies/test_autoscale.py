"""ModServe's autoscaling: ceil(M_L / M_C), on its period and when too few requests are in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.elastic_views import demand, demands, instance, load, view
from triptych.shared.policies.elastic.actions import Action, Advise, Drain, Launch, Wanted
from triptych.shared.policies.elastic.autoscale import ModServeScaling
from triptych.shared.policies.elastic.strategy import NOTHING, Memory
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, GroupDemand, Limits, Rates
from triptych.shared.policies.groups import ANY

TEXT_RATES = Rates(requests=10, text_tokens=3000, output_tokens=1000)  # 1.5 + 2.0 instances
IMAGE_RATES = Rates(requests=2, images=4, image_tokens=1800)  # 1.8 that encode, 0.9 more that prefill


def members(num_encoders: int, num_text: int) -> list[ElasticInstance]:
    return [instance(f"e{index}", "encoder") for index in range(num_encoders)] + [
        instance(f"t{index}", "text", ANY, load("decode", 1, 100)) for index in range(num_text)
    ]


def seen(num_encoders: int, num_text: int, attainment: float | None = None, now_s: float = 0.0) -> ClusterView:
    return view(
        members(num_encoders, num_text),
        demand(TEXT_RATES, attainment),
        demand(IMAGE_RATES),
        now_s=now_s,
        limits=Limits(2, 20),
    )


def actions(cluster: ClusterView, memory: Memory = NOTHING, safe_share: float = 1.0) -> list[Action]:
    return [one.action for one in ModServeScaling(safe_share=safe_share).decide(cluster, memory)[0]]


def test_as_many_as_the_tokens_need() -> None:
    advice = Advise((Wanted("encoder", ANY, 2), Wanted("text", ANY, 5)))  # ceil(1.8), ceil(1.5 + 0.9 + 2.0)
    assert actions(seen(1, 1)) == [advice, Launch("text", ANY, 4), Launch("encoder", ANY, 1)]
    assert actions(seen(2, 5)) == [advice]
    _, memory = ModServeScaling(safe_share=1.0).decide(seen(3, 7), NOTHING)
    kinds = [type(one) for one in actions(seen(3, 7, now_s=300.0), memory)]
    assert kinds == [Advise, Drain, Drain, Drain], "once all seven were too many for long enough"
    assert actions(seen(1, 1), safe_share=0.5)[0] == Advise((Wanted("encoder", ANY, 4), Wanted("text", ANY, 9)))


def test_terms_are_told() -> None:
    decisions, _ = ModServeScaling(safe_share=1.0).decide(seen(1, 1), NOTHING)
    assert decisions[1].terms["M_L/M_C"] == 4.4
    assert decisions[1].terms["num_instances"] == 1


def test_between_periods_only_late_requests_count() -> None:
    strategy = ModServeScaling(safe_share=1.0)
    _, memory = strategy.decide(seen(2, 5), NOTHING)
    assert strategy.decide(seen(1, 1, now_s=299.0), memory) == ([], memory)
    assert strategy.decide(seen(1, 1, 0.995, 299.0), memory) == ([], memory)
    decisions, _ = strategy.decide(seen(1, 1, 0.98, 299.0), memory)
    assert {type(one.action) for one in decisions} == {Launch}
    assert "99%" in decisions[0].reason
    assert {type(one.action) for one in strategy.decide(seen(1, 1, now_s=300.0), memory)[0]} == {Launch}


def test_late_requests_count_what_is_expected_and_take_nothing_away() -> None:
    burst = GroupDemand(IMAGE_RATES, IMAGE_RATES, peak_images_per_request=6.0, attainment=0.5, num_ended=50)
    cluster = view(members(2, 12), demand(TEXT_RATES), burst, limits=Limits(2, 20))
    late = ModServeScaling(safe_share=1.0).decide(cluster, NOTHING)[0]
    assert [one.action for one in late[1:]] == [Launch("encoder", ANY, 4)], "6 images a request; the many text instances stay"
    few = GroupDemand(IMAGE_RATES, IMAGE_RATES, attainment=0.5, num_ended=5)
    _, memory = ModServeScaling(safe_share=1.0).decide(cluster, NOTHING)
    later = view(members(2, 12), images=few, now_s=300.0, limits=Limits(2, 20))
    due = ModServeScaling(safe_share=1.0).decide(later, memory)[0]
    assert any(isinstance(one.action, Drain) for one in due), "five requests say nothing"


def test_a_fixed_pool_stays() -> None:
    cluster = view(members(1, 1), demand(TEXT_RATES), demand(IMAGE_RATES))
    assert actions(cluster) == []


def test_starting_instances_count() -> None:
    starting = [ElasticInstance(one.instance_id, one.roles, is_ready=False) for one in members(2, 5)]
    cluster = view(starting, demand(TEXT_RATES), demand(IMAGE_RATES), limits=Limits(2, 20))
    assert [type(one) for one in actions(cluster)] == [Advise]


@given(demands, demands, st.integers(1, 6), st.integers(1, 6))
def test_a_constant_load_settles(text: GroupDemand, images: GroupDemand, num_encoders: int, num_text: int) -> None:
    strategy, memory, pool = ModServeScaling(), NOTHING, members(num_encoders, num_text)
    changes = []
    for turn in range(8):
        cluster = view(pool, text, images, now_s=300.0 * turn, limits=Limits(2, 500))
        decisions, memory = strategy.decide(cluster, memory)
        for action in [one.action for one in decisions]:
            if isinstance(action, Launch):
                pool += [instance(f"{turn}-{index}", action.kind) for index in range(action.count)]
            elif isinstance(action, Drain):
                pool = [one for one in pool if one.instance_id != action.instance_id]
        changes.append(sum(not isinstance(one.action, Advise) for one in decisions))
    assert changes[3:] == [0] * 5
    assert sum("encoder" in one.roles for one in pool) >= 1


@given(demands, st.floats(1.0, 3.0))
def test_more_work_never_wants_fewer(load_now: GroupDemand, factor: float) -> None:
    def wanted(rates: Rates) -> list[int]:
        pool = view(members(1, 1), demand(rates), limits=Limits(2, 500))
        advice = ModServeScaling().decide(pool, NOTHING)[0][0].action
        assert isinstance(advice, Advise)
        return [one.count for one in advice.wanted]

    rates = load_now.average
    more = Rates(*(factor * getattr(rates, name) for name in Rates.__slots__))
    assert all(few <= many for few, many in zip(wanted(rates), wanted(more), strict=True))
