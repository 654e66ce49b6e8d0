"""When the end of a prompt is computed by the decode instance that holds the rest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from support.stage_views import View, view
from triptych.shared.messages import InstanceId
from triptych.shared.policies.follow_ups import NEVER, FollowUps, Hosts
from triptych.shared.policies.policy_set import POLICY_SETS
from triptych.shared.policies.routing import Choice, PromptWork, TransferCosts, choose_prefill
from triptych.shared.policies.routing_rules import RoutingRules

D, E, P = InstanceId("d"), InstanceId("e"), InstanceId("p")
RULE = FollowUps(max_tokens=100)
COSTS = TransferCosts(0.0, 1e-4)  # of 1000 tokens 0.1 s
TURN = PromptWork(1000, num_blocks=63, prefixes={D: 950}, kv_costs=COSTS)  # of which 50 ms are left at 1000 tokens a second
IDLE = view("p", pace=1000.0)


def choose(able: list[View], decoding: list[View], prefill: View | None = IDLE, prompt: PromptWork = TURN) -> Choice | None:
    candidates = [] if prefill is None else [prefill]
    return RoutingRules(follow_ups=RULE).prefill(candidates, prompt, 0, hosts=Hosts(able, decoding))


def chosen(able: list[View], decoding: list[View], prefill: View | None = IDLE, prompt: PromptWork = TURN) -> str | None:
    choice = choose(able, decoding, prefill, prompt)
    return None if choice is None else choice.instance_id


def test_enough_is_held_when_little_is_left_and_more_is_there() -> None:
    prompt = PromptWork(1000, prefixes={D: 900, E: 899})
    assert RULE.holders(prompt) == ["d"]
    assert RULE.holders(PromptWork(100, prefixes={D: 50, E: 49})) == ["d"]
    assert RULE.holders(PromptWork(50, prefixes={D: 50})) == ["d"], "the last token is computed anyway"
    assert RULE.holders(PromptWork(1, prefixes={D: 1})) == []
    assert NEVER.holders(prompt) == []


def test_an_idle_holder_goes_on_and_says_why() -> None:
    choice = choose([view("d")], [view("d")])
    assert choice is not None
    assert (choice.instance_id, choice.num_cached_tokens, choice.pull_from) == ("d", 950, None)
    assert choice.reason == "goes on where its KV is, 50 tokens to compute, 0.050 s, elsewhere 0.245 s"


def test_it_is_never_later_than_elsewhere_with_the_way_of_the_kv() -> None:
    """There it takes 145 ms, by pulling what is held, and the KV 100 ms to get to a decode instance."""
    decoding = [view("d", requests=4, pace=400.0)]  # steps of 10 ms
    assert chosen([view("d", tokens=180)], decoding) == "d", "it begins in 190 ms"
    assert chosen([view("d", tokens=200)], decoding) == "p"
    assert chosen([view("d", tokens=200)], decoding, view("p", tokens=100, pace=1000.0)) == "d", "it waits there, too"
    assert chosen([view("d", tokens=100)], decoding, replace(IDLE, decodes=True)) == "p", "no KV moves there either"


def test_what_is_long_beside_the_transfer_counts_for_those_that_wait_for_it() -> None:
    """80 ms of computing, or 38 ms less when nothing is moved: KV that comes makes them wait, too."""
    prompt = PromptWork(420, prefixes={D: 340, P: 400}, kv_costs=COSTS)  # 20 ms and 42 ms elsewhere
    assert chosen([view("d")], [view("d")], prompt=prompt) == "p"
    prompt = PromptWork(420, prefixes={D: 380, P: 400}, kv_costs=COSTS)
    assert chosen([view("d")], [view("d", requests=9)], prompt=prompt) == "d", "40 ms are no longer than the transfer"
    prompt = PromptWork(420, prefixes={D: 365, P: 400}, kv_costs=COSTS)
    assert chosen([view("d")], [view("d")], prompt=prompt) == "d"
    assert chosen([view("d")], [view("d", requests=9)], prompt=prompt) == "p", "13 ms more for nine"


def test_room_and_the_least_busy_of_several() -> None:
    both = PromptWork(1000, num_blocks=63, prefixes={D: 950, E: 950}, kv_costs=COSTS)
    assert chosen([view("d", tokens=9), view("e")], [], prompt=both) == "e"
    assert chosen([view("d", blocks=62)], []) == "p"
    assert chosen([view("d")], [], prefill=None) == "d", "nobody else could do it"


def test_who_has_follow_ups() -> None:
    having = {name for name, policies in POLICY_SETS.items() if policies.routing.follow_ups.max_tokens}
    assert having == {"triptych", "triptych_barrier", "triptych_undivided", "triptych_fixed", "elasticmm"}
    assert all(POLICY_SETS[name].cache.keeps_kv and "prefill" not in POLICY_SETS[name].routing.coupled for name in having)


loads = st.builds(lambda requests, tokens: view("d", requests, tokens), st.integers(0, 9), st.integers(0, 500))


@given(loads, loads, st.integers(0, 500), st.integers(501, 999))
def test_no_load_makes_it_dearer_than_elsewhere(host: View, outputs: View, waiting: int, num_held: int) -> None:
    prompt = PromptWork(1000, prefixes={D: num_held}, kv_costs=COSTS)
    prefill = view("p", tokens=waiting, pace=1000.0)
    choice = choose([host], [outputs], prefill, prompt)
    assert choice is not None
    if choice.instance_id == D:
        elsewhere = choose_prefill([prefill], prompt)
        assert elsewhere is not None
        assert (host.num_pending_tokens + 1000 - num_held) / 1000 <= elsewhere.cost_s + 0.1 + 1e-9
