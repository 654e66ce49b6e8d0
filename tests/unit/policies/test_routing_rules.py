"""Coupled routing, stage by stage, and round robin."""

from __future__ import annotations

from support.stage_views import view
from triptych.shared.messages import InstanceId
from triptych.shared.policies.routing import KV_COSTS, ImageWork, PromptWork
from triptych.shared.policies.routing_rules import RoutingRules

A, B = InstanceId("a"), InstanceId("b")
COUPLED = RoutingRules(coupled=frozenset(("encoder", "prefill", "decode")))
HALF = RoutingRules(coupled=frozenset(("encoder", "prefill")))
IN_TURN = RoutingRules(is_in_turn=True)


def test_a_home_is_the_instance_with_least_work_in_all_stages() -> None:
    encoders = [view("a", tokens=1000, pace=500.0), view("b", tokens=100, pace=500.0), view("only-encodes")]
    prefills = [view("a", pace=1000.0), view("b", tokens=1500, pace=1000.0)]
    decodes = [view("a", tokens=90_000, requests=50), view("b", requests=1)]
    home = COUPLED.home({"encoder": encoders, "prefill": prefills, "decode": decodes}, 0)
    assert home is not None
    assert home.instance_id == "b", "1.7 s against 2 s; tokens in context don't count"
    assert "1.700 s" in home.reason


def test_idle_homes_are_chosen_by_their_requests() -> None:
    home = COUPLED.home(
        {"encoder": [view("a"), view("b")], "prefill": [view("a"), view("b")], "decode": [view("a", 3), view("b", 2)]}, 0
    )
    assert home is not None
    assert home.instance_id == "b"


def test_homes_in_turn_and_nobody_at_home() -> None:
    rules = RoutingRules(coupled=COUPLED.coupled, is_in_turn=True)
    stages = {stage: [view("a", tokens=9), view("b")] for stage in sorted(rules.coupled)}
    homes = [rules.home(stages, turn) for turn in range(3)]
    assert [home.instance_id for home in homes if home is not None] == ["a", "b", "a"]
    for each in (COUPLED, rules):
        assert each.home({"encoder": [view("a")], "prefill": [view("b")], "decode": [view("b")]}, 0) is None


def test_coupled_stages_stay_at_home_and_share_no_kv() -> None:
    candidates = [view("a"), view("b", tokens=9999, requests=9)]
    prompt = PromptWork(1000, prefixes={A: 900, B: 100}, kv_costs=KV_COSTS)
    for choice in (
        COUPLED.encoder(candidates, ImageWork(256, holders=[A]), 0, home=B),
        COUPLED.prefill(candidates, prompt, 0, home=B),
        COUPLED.decode(candidates, 5, B, home=B),
    ):
        assert choice is not None
        assert choice.instance_id == "b"
    prefill = COUPLED.prefill(candidates, prompt, 0, home=B)
    assert prefill is not None
    assert (prefill.num_cached_tokens, prefill.pull_from) == (100, None)
    assert COUPLED.prefill([view("a")], prompt, 0, home=B) is None, "home has refused: nobody else does it"
    decode = HALF.decode([view("c", tokens=5), view("d")], 5, B, home=B)
    assert decode is not None
    assert decode.instance_id == "d"


def test_round_robin_by_stage_ignores_load() -> None:
    candidates = [view("a", tokens=9999), view("b")]
    images = [IN_TURN.encoder(candidates, ImageWork(256), turn) for turn in range(3)]
    prompts = [IN_TURN.prefill(candidates, PromptWork(9), turn) for turn in range(3)]
    for choices in (images, prompts):
        assert [choice.instance_id for choice in choices if choice is not None] == ["a", "b", "a"]
