"""Routing choices on views made by hand and at random."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.shared.messages import InstanceId
from triptych.shared.policies.routing import choose_decode, choose_encoder, choose_prefill, choose_preprocess

LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests take the cores


@dataclass(frozen=True)
class View:
    instance_id: InstanceId
    num_requests: int = 0
    num_pending_tokens: int = 0
    num_free_blocks: int = 100


def view(name: str, requests: int = 0, tokens: int = 0, blocks: int = 100) -> View:
    return View(InstanceId(name), requests, tokens, blocks)


views = st.lists(
    st.builds(view, st.text("abc", min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 9999), st.integers(0, 50)),
    max_size=6,
    unique_by=lambda v: v.instance_id,
)


def test_encoders_and_prefills_are_chosen_by_tokens_not_by_requests() -> None:
    candidates = [view("a", requests=1, tokens=4000), view("b", requests=9, tokens=900)]
    for choose in (choose_encoder, choose_prefill):
        choice = choose(candidates)
        assert choice is not None
        assert choice.instance_id == "b"
        assert "900" in choice.reason


def test_preprocess_is_chosen_by_requests() -> None:
    choice = choose_preprocess([view("a", requests=3, tokens=0), view("b", requests=1, tokens=50)])
    assert choice is not None
    assert choice.instance_id == "b"


def test_decode_stays_with_the_kv_while_there_is_room() -> None:
    own, other = view("own", tokens=9000, blocks=1), view("other", tokens=0, blocks=10)
    choice = choose_decode([other, own], num_blocks=10, prefill_id=InstanceId("own"))
    assert choice is not None
    assert choice.instance_id == "own"
    full = view("own", tokens=9000, blocks=0)
    choice = choose_decode([other, full], num_blocks=11, prefill_id=InstanceId("own"))
    assert choice is not None
    assert choice.instance_id == "other", "without room anywhere the least loaded one, which may preempt"


def test_decode_prefers_room_over_load() -> None:
    full, roomy = view("full", tokens=10, blocks=1), view("roomy", tokens=500, blocks=40)
    choice = choose_decode([full, roomy], num_blocks=5, prefill_id=InstanceId("elsewhere"))
    assert choice is not None
    assert choice.instance_id == "roomy"


@LOADED
@given(views)
def test_the_choice_is_a_candidate_none_is_better_and_order_does_not_matter(candidates: list[View]) -> None:
    for choose, load in (
        (choose_encoder, lambda v: v.num_pending_tokens),
        (choose_prefill, lambda v: v.num_pending_tokens),
        (choose_preprocess, lambda v: v.num_requests),
    ):
        choice = choose(candidates)
        assert (choice is None) == (not candidates)
        if choice is not None:
            [chosen] = [v for v in candidates if v.instance_id == choice.instance_id]
            assert load(chosen) == min(map(load, candidates))
            assert choose(candidates[::-1]) == choice


@LOADED
@given(views, st.integers(0, 60))
def test_decode_never_takes_one_without_room_where_another_has_it(candidates: list[View], num_blocks: int) -> None:
    choice = choose_decode(candidates, num_blocks, InstanceId("elsewhere"))
    assert (choice is None) == (not candidates)
    if choice is not None and any(v.num_free_blocks >= num_blocks for v in candidates):
        [chosen] = [v for v in candidates if v.instance_id == choice.instance_id]
        assert chosen.num_free_blocks >= num_blocks
