"""Properties of every schedule that is made of a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.shaping import rate_scaled, shaped, sped_up, window, with_at_most_images
from triptych.loadgen.traces.trace import Shaping, TraceOptions

WITHIN_S = 3.0


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Up to 40 rows in order of time, some of them of four conversations."""
    gaps = draw(st.lists(st.floats(0, 20), max_size=40))
    rows, now, turns = [], 0.0, Counter[str]()
    for gap in gaps:
        now += gap
        session = draw(st.sampled_from([None, "a", "b", "c", "d"]))
        num_images = draw(st.integers(0, 30))
        rows.append(
            TraceRow(
                now,
                draw(st.integers(100, 5000)),
                1,
                num_images,
                draw(st.none() | st.integers(0, 100)) if num_images else None,
                session,
                turns[session] if session else 0,
                tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
                16,
                tuple(draw(st.lists(st.integers(0, 9), min_size=num_images, max_size=num_images))),
            )
        )
        turns[session or ""] += 1
    return rows


rates = st.floats(0, 4)


def scaled(rows: list[TraceRow], text: float, image: float, seed: int = 0) -> list[TraceRow]:
    return list(rate_scaled(iter(rows), {"text": text, "image": image}, WITHIN_S, seed))


def scaled_as(row: TraceRow, classes: dict[str, str]) -> str:
    """classes: of conversations."""
    return classes[row.session.partition("~")[0]] if row.session else row.request_class


def content(row: TraceRow) -> TraceRow:
    """What a copy has of its original."""
    return replace(row, arrival_s=0, session=None, prefix_ids=(), image_ids=())


@given(traces(), rates, rates, st.integers(0, 5))
def test_scaled_rows(rows: list[TraceRow], text: float, image: float, seed: int) -> None:
    """In order, the same for the same seed, each row floor(rate) or one more times, copies within the bound, in its class."""
    made = scaled(rows, text, image, seed)
    classes = {row.session: row.request_class for row in reversed(rows) if row.session}  # the first row's counts
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(made))
    assert made == scaled(rows, text, image, seed)
    for row in rows:
        soon = [made_row for made_row in made if row.arrival_s <= made_row.arrival_s <= row.arrival_s + WITHIN_S]
        rate = {"text": text, "image": image}[scaled_as(row, classes)]
        assert sum(content(made_row) == content(row) for made_row in soon) >= int(rate)
    for name, rate in (("text", text), ("image", image)):
        before, after = (sum(scaled_as(row, classes) == name for row in some) for some in (rows, made))
        assert int(rate) * before <= after <= int(rate + 1) * before


@given(traces(), rates, rates)
def test_conversations_are_kept_whole(rows: list[TraceRow], text: float, image: float) -> None:
    """Each copy of a conversation has all its turns, at its own times."""
    for made in (scaled(rows, text, text), scaled(rows, text, image)):
        whole = {session: [row for row in rows if row.session == session] for session in "abcd"}
        copies: dict[str, list[TraceRow]] = {}
        for row in made:
            if row.session is not None:
                copies.setdefault(row.session, []).append(row)
        for name, turns in copies.items():
            original = whole[name.split("~")[0]]
            assert [row.turn for row in turns] == [row.turn for row in original]
            delays = {round(a.arrival_s - b.arrival_s, 6) for a, b in zip(turns, original, strict=True)}
            assert len(delays) == 1


@given(traces(), st.integers(2, 3))
def test_copies_share_prefixes_and_pictures_among_themselves_only(rows: list[TraceRow], rate: int) -> None:
    """Else each copy would be a hit in a cache, and a higher rate a better cache."""
    rows = [replace(row, session=None) for row in rows]
    of_copy = Counter(name >> 48 for row in scaled(rows, rate, rate) for name in (*row.prefix_ids, *row.image_ids))
    total = sum(len(row.prefix_ids) + len(row.image_ids) for row in rows)
    assert of_copy == (dict.fromkeys(range(rate), total) if total else {})


def test_classes_are_scaled_apart() -> None:
    rows = [TraceRow(float(i), 10, 1, num_images=i % 2) for i in range(4000)]
    made = Counter(row.request_class for row in scaled(rows, 0.25, 1.5))
    assert made["text"] == pytest.approx(500, abs=100)  # sigma of the draws: 19
    assert made["image"] == pytest.approx(3000, abs=100)  # 22
    other = scaled(rows, 0.25, 1.0, seed=1)
    assert {row for row in other if not row.num_images} != {row for row in scaled(rows, 0.25, 1.0) if not row.num_images}
    assert [row for row in scaled(rows, 0.25, 1.5) if not row.num_images] == [
        row for row in scaled(rows, 0.25, 0.0) if not row.num_images
    ], "the draws of one class do not depend on the other's rate"


@given(traces(), st.floats(0, 300), st.none() | st.floats(0.1, 300), st.floats(0.1, 10), st.none() | st.integers(0, 10))
def test_window_speed_limit(
    rows: list[TraceRow], start_s: float, duration_s: float | None, speed_up: float, limit: int | None
) -> None:
    made = list(shaped(iter(rows), TraceOptions(start_s=start_s, duration_s=duration_s, speed_up=speed_up, limit=limit)))
    inside = [row for row in rows if start_s <= row.arrival_s and (duration_s is None or row.arrival_s < start_s + duration_s)]
    assert [row.arrival_s for row in made] == pytest.approx([(row.arrival_s - start_s) / speed_up for row in inside[:limit]])
    assert all(row.arrival_s >= 0 for row in made)


@given(traces())
def test_nothing_asked_nothing_changed(rows: list[TraceRow]) -> None:
    assert list(shaped(iter(rows), TraceOptions(max_images=None))) == rows


@given(traces(), st.integers(0, 16))
def test_cap(rows: list[TraceRow], max_images: int) -> None:
    shaping = Shaping()
    for row, made in zip(rows, with_at_most_images(iter(rows), max_images, shaping), strict=True):
        assert made.num_images == min(row.num_images, max_images) == len(made.image_ids)
        if row.num_image_tokens is not None and made.num_image_tokens is not None:
            text_tokens = row.num_context_tokens - row.num_image_tokens
            assert made.num_context_tokens - made.num_image_tokens == text_tokens
            assert made.num_image_tokens * max(1, row.num_images) <= row.num_image_tokens * max(1, made.num_images)
        else:
            assert made.num_context_tokens == row.num_context_tokens
    left_out = [row.num_images - max_images for row in rows if row.num_images > max_images]
    assert (shaping.num_capped_rows, shaping.num_images_left_out) == (len(left_out), sum(left_out))


def test_only_what_is_left_is_capped_and_counted() -> None:
    shaping = Shaping()
    rows = (TraceRow(float(second), 100, 1, num_images=5) for second in range(10))
    made = list(shaped(rows, TraceOptions(start_s=4, max_images=3, limit=2), shaping))
    assert [row.num_images for row in made] == [3, 3]
    assert (shaping.num_capped_rows, shaping.num_images_left_out) == (2, 4)


def test_a_long_way_to_the_start_can_be_given_up() -> None:
    shaping = Shaping()

    def endless() -> Iterator[TraceRow]:
        for second in count():
            assert second < 1000, "nobody wants these any more"
            shaping.is_stopped = second > 10
            yield TraceRow(float(second), 1, 1)

    assert list(shaped(endless(), TraceOptions(start_s=1e9), shaping)) == []


def test_a_window_ends_before_the_trace_does() -> None:
    """Nobody reads a week to replay its first minute."""

    def endless() -> Iterator[TraceRow]:
        for second in count():
            assert second <= 61
            yield TraceRow(float(second), 1, 1)

    assert len(list(window(endless(), 0, 60))) == 60
    assert len(list(islice(sped_up(endless(), 2), 10))) == 10
