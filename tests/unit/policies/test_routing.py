"""Routing choices on views made by hand and at random."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.stage_views import View, view, views
from triptych.shared.messages import InstanceId
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import (
    KV_COSTS,
    Choice,
    ImageWork,
    PromptWork,
    TransferCosts,
    choose_decode,
    choose_encoder,
    choose_prefill,
    choose_preprocess,
    in_turn,
)

LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests take the cores
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def made(choice: Choice | None) -> Choice:
    assert choice is not None
    return choice


def test_encoders_and_prefills_are_chosen_by_tokens_not_by_requests() -> None:
    candidates = [view("a", requests=1, tokens=4000), view("b", requests=9, tokens=900)]
    for choice in (made(choose_encoder(candidates, ImageWork(9))), made(choose_prefill(candidates, PromptWork(9)))):
        assert choice.instance_id == "b"
        assert "900" in choice.reason


def test_preprocess_is_chosen_by_requests() -> None:
    assert made(choose_preprocess([view("a", requests=3, tokens=0), view("b", requests=1, tokens=50)])).instance_id == "b"


def test_seconds_count_where_rates_are_known() -> None:
    slow, fast = view("a", tokens=500, pace=100.0), view("b", tokens=900, pace=1000.0)
    assert made(choose_encoder([slow, fast], ImageWork(9))).instance_id == "b"
    busy = view("b", tokens=900, pace=1000.0, other_s=9.0)
    assert made(choose_prefill([slow, busy], PromptWork(9))).instance_id == "a", "its engine is busy with another stage"


def test_small_differences_of_rates_don_t_draw_all_work_to_one_instance() -> None:
    candidates = [view("a", requests=1, pace=1000.0), view("b", pace=900.0), view("c", pace=1100.0)]
    assert made(choose_encoder(candidates, ImageWork(9))).instance_id == "b"


def test_an_image_that_is_held_is_not_encoded() -> None:
    candidates = [view("a"), view("b", requests=8, tokens=9999), view("c", requests=7, tokens=9999)]
    choice = made(choose_encoder(candidates, ImageWork(256, holders=[B, C, InstanceId("gone")])))
    assert (choice.instance_id, choice.num_cached_tokens) == ("c", 256)
    choice = made(choose_encoder(candidates, ImageWork(256, holders=[InstanceId("gone")])))
    assert (choice.instance_id, choice.num_cached_tokens) == ("a", 0)


def test_an_image_is_encoded_where_its_prompt_goes_unless_another_is_sooner() -> None:
    work = ImageWork(100, prompt_at=B, transfer_s=0.05)
    assert made(choose_encoder([view("a", pace=1000), view("b", pace=1000)], work)).instance_id == "b"
    assert made(choose_encoder([view("a", pace=1000), view("b", tokens=40, pace=1000)], work)).instance_id == "b"
    assert made(choose_encoder([view("a", pace=1000), view("b", tokens=60, pace=1000)], work)).instance_id == "a"


def test_cached_kv_attracts_as_much_as_it_saves() -> None:
    """The load guard: a holder that is too busy is left for an idle instance."""
    prompt = PromptWork(1000, prefixes={B: 800})
    choice = made(choose_prefill([view("a", pace=1000), view("b", tokens=700, pace=1000)], prompt))
    assert (choice.instance_id, choice.num_cached_tokens, choice.pull_from) == ("b", 800, None)
    choice = made(choose_prefill([view("a", pace=1000), view("b", tokens=900, pace=1000)], prompt))
    assert (choice.instance_id, choice.num_cached_tokens, choice.pull_from) == ("a", 0, None)


def test_kv_is_pulled_when_that_is_cheaper_than_computing() -> None:
    busy = [view("a", pace=1000), view("b", tokens=5000, pace=1000)]
    cheap, dear = TransferCosts(0.01, 1e-4), TransferCosts(0.01, 2e-3)
    choice = made(choose_prefill(busy, PromptWork(1000, prefixes={A: 200, B: 800}, kv_costs=cheap)))
    assert (choice.instance_id, choice.num_cached_tokens, choice.pull_from) == ("a", 800, "b")
    assert "pulled from b" in choice.reason
    choice = made(choose_prefill(busy, PromptWork(1000, prefixes={A: 200, B: 800}, kv_costs=dear)))
    assert (choice.instance_id, choice.num_cached_tokens, choice.pull_from) == ("a", 200, None)


def test_one_token_is_always_computed() -> None:
    assert made(choose_prefill([view("a")], PromptWork(64, prefixes={A: 64}))).num_cached_tokens == 63


def test_prefill_prefers_room_then_where_embeddings_are() -> None:
    full, roomy = view("a", blocks=3), view("b", tokens=50, blocks=40)
    assert made(choose_prefill([full, roomy], PromptWork(100, num_blocks=7))).instance_id == "b"
    idle = [view("a"), view("b")]
    assert made(choose_prefill(idle, PromptWork(100, saved_s={B: 0.001}))).instance_id == "b"
    assert made(choose_prefill(idle, PromptWork(100))).instance_id == "a"


def test_a_prompt_goes_to_an_instance_that_encodes_when_it_gains_more_than_the_images_lose() -> None:
    encoding = replace(view("a", pace=1000.0), has_images=True)
    for own_tokens, waiting, expected in ((1000, 900, "b"), (1000, 1100, "a"), (10, 90, "b"), (10, 110, "a")):
        choice = made(choose_prefill([encoding, view("b", tokens=waiting, pace=1000.0)], PromptWork(own_tokens)))
        assert choice.instance_id == expected, (own_tokens, waiting)
    calm = replace(encoding, has_images=False)
    assert made(choose_prefill([calm, view("b", tokens=1, pace=1000.0)], PromptWork(1000))).instance_id == "a"


def test_a_prompt_is_computed_where_it_is_decoded_unless_the_way_of_its_kv_is_shorter_than_the_wait() -> None:
    prompt = PromptWork(1000, kv_costs=TransferCosts(0.0, 1e-4))  # 0.1 s
    for waiting, expected in ((90, "b"), (110, "a")):
        there = replace(view("b", tokens=waiting, pace=1000.0), decodes=True)
        assert made(choose_prefill([view("a", pace=1000.0), there], prompt)).instance_id == expected


def test_decoding_leaves_an_instance_that_has_images_waiting() -> None:
    own = replace(view("own"), has_images=True)
    assert made(choose_decode([own, view("other", tokens=500)], 5, InstanceId("own"))).instance_id == "other"
    assert made(choose_decode([own], 5, InstanceId("own"))).instance_id == "own"
    own = replace(own, has_images=False)
    assert made(choose_decode([own, view("other", tokens=500)], 5, InstanceId("own"))).instance_id == "own"


def test_decode_stays_with_the_kv_while_there_is_room() -> None:
    own, other = view("own", tokens=9000, blocks=1), view("other", tokens=0, blocks=10)
    assert made(choose_decode([other, own], num_blocks=10, prefill_id=InstanceId("own"))).instance_id == "own"
    full = view("own", tokens=9000, blocks=0)
    choice = made(choose_decode([other, full], num_blocks=11, prefill_id=InstanceId("own")))
    assert choice.instance_id == "other", "without room anywhere the least loaded one, which may preempt"


def test_decode_prefers_room_over_load() -> None:
    full, roomy = view("full", tokens=10, blocks=1), view("roomy", tokens=500, blocks=40)
    assert made(choose_decode([full, roomy], num_blocks=5, prefill_id=InstanceId("elsewhere"))).instance_id == "roomy"


def test_turns_go_round() -> None:
    candidates = [view("b", tokens=9), view("a"), view("c")]
    assert [made(in_turn(candidates, turn)).instance_id for turn in range(4)] == ["a", "b", "c", "a"]
    assert in_turn([], 3) is None


@LOADED
@given(views, st.integers(0, 5000))
def test_the_choice_is_a_candidate_none_is_better_and_order_does_not_matter(candidates: list[View], num_tokens: int) -> None:
    pace = Pace.of(candidates)
    for choose, load in (
        (lambda some: choose_encoder(some, ImageWork(num_tokens)), lambda v: pace.finish_s(v, num_tokens)),
        (lambda some: choose_prefill(some, PromptWork(num_tokens)), lambda v: pace.finish_s(v, num_tokens)),
        (choose_preprocess, lambda v: v.num_requests),
    ):
        choice = choose(candidates)
        assert (choice is None) == (not candidates)
        if choice is not None:
            [chosen] = [v for v in candidates if v.instance_id == choice.instance_id]
            assert load(chosen) == min(map(load, candidates))
            assert choose(candidates[::-1]) == choice


@LOADED
@given(
    views, st.integers(1, 5000), st.dictionaries(st.text("abc", min_size=1, max_size=3).map(InstanceId), st.integers(0, 9999))
)
def test_affinity_never_waits_longer_than_the_least_loaded_would(
    candidates: list[View], num_tokens: int, prefixes: dict[InstanceId, int]
) -> None:
    choice = choose_prefill(candidates, PromptWork(num_tokens, prefixes=prefixes, kv_costs=KV_COSTS))
    if choice is None:
        return
    pace = Pace.of(candidates)
    [chosen] = [v for v in candidates if v.instance_id == choice.instance_id]
    pull_s = KV_COSTS.transfer_s(choice.num_cached_tokens - prefixes.get(chosen.instance_id, 0)) if choice.pull_from else 0.0
    first_token_s = pace.finish_s(chosen, num_tokens - choice.num_cached_tokens) + pull_s
    assert first_token_s <= min(pace.finish_s(v, num_tokens) for v in candidates) * (1 + 1e-9)
    assert 0 <= choice.num_cached_tokens < num_tokens
    assert choice.num_cached_tokens <= prefixes.get(choice.pull_from or chosen.instance_id, 0)


@LOADED
@given(views, st.integers(0, 60))
def test_decode_never_takes_one_without_room_where_another_has_it(candidates: list[View], num_blocks: int) -> None:
    choice = choose_decode(candidates, num_blocks, InstanceId("elsewhere"))
    assert (choice is None) == (not candidates)
    if choice is not None and any(v.num_free_blocks >= num_blocks for v in candidates):
        [chosen] = [v for v in candidates if v.instance_id == choice.instance_id]
        assert chosen.num_free_blocks >= num_blocks
