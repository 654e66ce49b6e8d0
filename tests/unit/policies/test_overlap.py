"""When a prompt is computed while its images are encoded, and what that gains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.policies.overlap import OverlapView, PendingImage, always, by_gain, never


def images_of(num: int, encode_s: float, encoders: int) -> list[PendingImage]:
    """num images of 100 tokens after 10 of text, encoded by that many encoders."""
    return [PendingImage(10 + 100 * i, encode_s * (i // encoders + 1)) for i in range(num)]


def test_the_pipeline_of_eight_images() -> None:
    """By hand: 8 images of 1 s on 2 encoders land at 1, 1, 2, 2, 3, 3, 4, 4 s; each is computed in 0.5 s."""
    view = OverlapView(810, 200.0, 0.0, images_of(8, 1.0, 2))
    assert view.barrier_s() == pytest.approx(4 + 810 / 200)
    assert view.overlapped_s() == pytest.approx(4 + 200 / 200), "the last two images are left when they land"
    verdict = by_gain(view)
    assert verdict.is_yes
    assert verdict.gain_s == pytest.approx(3.05)
    assert not never(view).is_yes
    assert always(view).is_yes


def test_one_image_after_a_short_text_is_not_worth_it() -> None:
    view = OverlapView(266, 1000.0, 0.0, [PendingImage(10, 0.5)])
    assert not by_gain(view).is_yes
    assert always(view).is_yes
    long = OverlapView(1256, 1000.0, 0.0, [PendingImage(1000, 0.5)])
    assert by_gain(long).is_yes, "half of a second of text is computed meanwhile"


def test_a_long_queue_leaves_nothing_to_gain() -> None:
    assert by_gain(OverlapView(810, 200.0, 0.0, images_of(8, 1.0, 2))).is_yes
    assert not by_gain(OverlapView(810, 200.0, 5.0, images_of(8, 1.0, 2))).is_yes


def test_others_there_raise_what_has_to_be_gained() -> None:
    view = OverlapView(810, 200.0, 0.0, images_of(8, 1.0, 2))
    assert by_gain(replace(view, num_others=4)).is_yes
    assert not by_gain(replace(view, num_others=10)).is_yes, "3.05 s gained, 4.4 s needed"


def test_cross_attention_and_cached_images_have_nothing_to_overlap() -> None:
    view = OverlapView(810, 200.0, 0.0, images_of(8, 1.0, 2), attends_to_all=True)
    for overlap in (always, by_gain):
        assert not overlap(view).is_yes
        assert not overlap(OverlapView(810, 200.0, 0.0, [])).is_yes


@given(
    st.integers(1, 2000),
    st.floats(1.0, 1e5),
    st.floats(0.0, 10.0),
    st.lists(st.tuples(st.integers(0, 2000), st.floats(0.0, 10.0)), max_size=8),
)
def test_overlapping_is_never_predicted_slower(
    num_tokens: int, pace: float, wait_s: float, places: list[tuple[int, float]]
) -> None:
    images = [PendingImage(min(offset, num_tokens), ready_s) for offset, ready_s in sorted(places)]
    view = OverlapView(num_tokens, pace, wait_s, images)
    assert view.overlapped_s() <= view.barrier_s() + 1e-9
    work_s = num_tokens / pace
    assert view.overlapped_s() >= max([wait_s + work_s, *(image.ready_s for image in images)]) - 1e-9
