"""Who holds which part of an image: as it is written, and how parts make an image."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.cache.held_parts import HeldPart, cover, held_part, holder_of
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId

E = InstanceId("encoder-0-5f3a2c1b")
TILED = ImageInfo(b"t" * 32, 1344, 1792, (13, 1, 1025), 13 * 256, 13)
WHOLE = ImageInfo(b"w" * 32, 56, 56, (1, 4, 4), 4)


def ranges(held: list[HeldPart]) -> list[tuple[int | None, int]]:
    return [(part.first_piece, part.num_pieces) for part in cover(TILED, held)]


def test_what_is_written_is_read() -> None:
    part = TILED.part(4, 3)
    assert holder_of(E, part.key) == f"{E}#4+3"
    assert held_part(holder_of(E, part.key)) == HeldPart.of(E, part)
    assert held_part(holder_of(E, part.key)).is_of(part)
    assert not held_part(holder_of(E, part.key)).is_of(TILED.part(4, 2))
    assert holder_of(E, TILED.key) == E
    assert held_part(E).is_of(TILED)
    assert held_part(E).is_of(WHOLE)


def test_a_part_is_an_image_of_its_own_size() -> None:
    part = TILED.part(4, 3)
    assert (part.num_tokens, part.grid_thw, part.height, part.width) == (3 * 256, (3, 1, 1025), 1344, 1792)
    assert len({part.key, TILED.key, TILED.part(0, 3).key, TILED.part(4, 4).key}) == 4
    assert TILED.part(0, 13) is TILED


def test_parts_make_an_image() -> None:
    assert ranges([HeldPart(E, 0, 7), HeldPart(E, 7, 6)]) == [(0, 7), (7, 6)]
    assert ranges([HeldPart(E, 7, 6)]) == [(0, 7), (7, 6)], "what is missing lies between"
    assert ranges([HeldPart(E, 2, 3), HeldPart(E, 7, 2)]) == [(0, 2), (2, 3), (5, 2), (7, 2), (9, 4)]


def test_parts_of_several_divisions_do_not_overlap() -> None:
    assert ranges([HeldPart(E, 0, 4), HeldPart(E, 4, 9), HeldPart(E, 0, 7), HeldPart(E, 7, 6)]) == [(0, 7), (7, 6)]


def test_one_that_holds_all_will_do() -> None:
    assert cover(TILED, [HeldPart(E, 0, 7), held_part(E)]) == [TILED]
    assert cover(TILED, []) == [TILED]
    assert cover(WHOLE, [held_part(E)]) == [WHOLE]


def test_nonsense_in_the_index_is_no_harm() -> None:
    assert cover(TILED, [HeldPart(E, 9, 9), HeldPart(E, 3, 0), HeldPart(E, 99, 1)]) == [TILED]
    assert cover(WHOLE, [HeldPart(E, 1, 1)]) == [WHOLE]
    assert held_part(InstanceId("#1+2")) == HeldPart(InstanceId("#1+2"))


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15))))
def test_a_cover_is_the_image(held: list[tuple[int, int]]) -> None:
    parts = cover(TILED, [HeldPart(E, first, num) for first, num in held])
    end = 0
    for part in parts:
        assert (part.first_piece or 0) == end
        end += part.num_pieces
    assert end == 13
    assert sum(part.num_tokens for part in parts) == TILED.num_tokens
