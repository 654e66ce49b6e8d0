"""How one image is divided among encoders: only where that is sooner, nobody idle while another has much to do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.stage_views import View, view, views
from triptych.shared.messages import InstanceId
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.policy_set import POLICY_SETS
from triptych.shared.policies.sharding import MAX_SHARES, MIN_GAIN_SHARE, STEP_S, DivisibleImage, by_finish, undivided

TILES = DivisibleImage(num_pieces=13, piece_tokens=256, transfer_s=0.024)  # InternVL2.5: 12 tiles and a thumbnail
PACE = 2600.0  # ten tiles a second, as of its tower on an A100


def encoders(*tokens: int, pace: float = PACE) -> list[View]:
    return [view(f"e{i}", tokens=pending, pace=pace) for i, pending in enumerate(tokens)]


def pieces(candidates: list[View], image: DivisibleImage = TILES) -> dict[str, int]:
    return {share.instance_id: share.num_pieces for share in by_finish(candidates, image)}


def test_idle_encoders_get_equally_many() -> None:
    assert pieces(encoders(0, 0)) == {"e0": 7, "e1": 6}
    assert sorted(pieces(encoders(0, 0, 0, 0)).values()) == [3, 3, 3, 4]


def test_the_least_of_all_comes_first_so_that_the_prompt_goes_on_with_it() -> None:
    assert [share.num_pieces for share in by_finish(encoders(0, 0, 0, 0), TILES)] == [3, 3, 3, 4]


def test_busy_encoders_get_less_or_nothing() -> None:
    assert pieces(encoders(0, 3 * 256)) == {"e0": 8, "e1": 5}
    assert pieces(encoders(0, 0, 20 * 256)) == {"e0": 7, "e1": 6}
    assert pieces(encoders(0, 20 * 256)) == {}, "alone it is done sooner than the other would begin"


def test_a_slow_encoder_gets_less() -> None:
    fast_and_slow = [view("fast", pace=PACE), view("fast2", pace=PACE), view("slow", pace=PACE / 4)]
    assert pieces(fast_and_slow) == {"fast": 6, "fast2": 6, "slow": 1}


def test_what_gains_little_is_not_divided() -> None:
    assert not by_finish(encoders(0, 0, pace=1e6), TILES), "a step more costs more than it saves"
    assert by_finish(encoders(30 * 256, 30 * 256), TILES)
    assert by_finish(encoders(300 * 256, 300 * 256), TILES) == (), "half a second of half a minute"


def test_a_step_more_costs_all_that_wait_there() -> None:
    crowded = [replace(one, num_requests=60) for one in encoders(0, 0)]
    assert pieces([crowded[0], encoders(0, 0)[1]]) == {"e0": 3, "e1": 10}


def test_there_must_be_something_to_divide_and_somebody_to_divide_among() -> None:
    assert by_finish([], TILES) == by_finish(encoders(0), TILES) == ()
    assert by_finish(encoders(0, 0), DivisibleImage(1, 4096)) == ()
    assert undivided(encoders(0, 0), TILES) == ()


def test_where_the_prompt_goes_embeddings_need_not_travel() -> None:
    assert pieces(encoders(0, 0), replace(TILES, prompt_at=InstanceId("e1"))) == {"e0": 6, "e1": 7}
    large = DivisibleImage(13, 2560, InstanceId("e1"), transfer_s=0.234)  # encoding takes 0.3 s
    assert pieces(encoders(0, 0, pace=100_000), large) == {"e0": 2, "e1": 11}


def test_only_ours_divides() -> None:
    divide = {name for name, policies in POLICY_SETS.items() if policies.sharding is by_finish}
    assert divide == {"triptych", "triptych_barrier", "triptych_uncached", "triptych_handed_over", "triptych_fixed"}


@given(views, st.integers(1, 20), st.sampled_from([64, 256, 1024]))
def test_shares_are_whole_and_worth_it(candidates: list[View], num_pieces: int, piece_tokens: int) -> None:
    image = DivisibleImage(num_pieces, piece_tokens, transfer_s=0.02)
    shares = by_finish(candidates, image)
    assume(shares)
    ids = [share.instance_id for share in shares]
    assert sum(share.num_pieces for share in shares) == num_pieces
    assert min(share.num_pieces for share in shares) > 0
    assert len(set(ids)) == len(ids) == len(shares) <= min(MAX_SHARES, num_pieces)
    assert all(share.reason for share in shares)
    alone_s = min(ready_s(one, candidates, image, num_pieces) for one in candidates)
    by_id = {one.instance_id: one for one in candidates}
    times_s = [ready_s(by_id[share.instance_id], candidates, image, share.num_pieces) for share in shares]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= (1 - MIN_GAIN_SHARE) * alone_s


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=3), st.integers(2, 6), st.sampled_from([256, 1024]))
def test_no_other_division_is_done_sooner(pending: list[int], num_pieces: int, piece_tokens: int) -> None:
    """All divisions are tried."""
    candidates, image = encoders(*pending), DivisibleImage(num_pieces, piece_tokens, transfer_s=0.02)
    best_s = min(
        max(ready_s(one, candidates, image, num) for one, num in zip(candidates, nums, strict=True) if num)
        for nums in itertools.product(range(num_pieces + 1), repeat=len(candidates))
        if sum(nums) == num_pieces
    )
    alone_s = min(ready_s(one, candidates, image, num_pieces) for one in candidates)
    shares = pieces(candidates, image)
    if not shares:
        assert best_s > (1 - MIN_GAIN_SHARE) * alone_s
    else:
        times_s = [ready_s(one, candidates, image, shares.get(one.instance_id, 0)) for one in candidates]
        used = [time_s for time_s, one in zip(times_s, candidates, strict=True) if one.instance_id in shares]
        assert max(used) == pytest.approx(best_s)


def ready_s(candidate: View, candidates: list[View], image: DivisibleImage, num_pieces: int) -> float:
    """Until an instance has encoded so many pieces, and all were transferred."""
    step_s = STEP_S * (1 + candidate.num_requests)
    encoded_s = Pace.of(candidates).finish_s(candidate, num_pieces * image.piece_tokens)
    return step_s + encoded_s + image.transfer_s
