"""How a body is read: no JSON text of few bytes may cost much memory, or keep other threads waiting."""

from __future__ import annotations

import pytest

from triptych.services.router.edge_model import MIN_MARKS, PIECE_BYTES, TEXT_CHARS_PER_MARK, decode_body
from triptych.shared.errors import BadRequest

MAX_CHARS = 1 << 20
MAX_MARKS = MIN_MARKS + MAX_CHARS // TEXT_CHARS_PER_MARK


@pytest.mark.parametrize("value", ["[]", "{}", "1", '""', "1e9", "[[]]", '{"a":0}'])
def test_many_values_are_refused(value: str) -> None:
    body = f'{{"unknown": [{",".join([value] * (MAX_MARKS + 1))}]}}'
    with pytest.raises(BadRequest, match="too many JSON values") as caught:
        decode_body(body.encode(), MAX_CHARS)
    assert (caught.value.status, caught.value.code) == (413, "too_many_values")


def test_many_keys_are_refused() -> None:
    body = ",".join(f'"{i}":0' for i in range(MAX_MARKS + 1))
    with pytest.raises(BadRequest, match="too many JSON values"):
        decode_body(f"{{{body}}}".encode(), MAX_CHARS)


def test_marks_count_wherever_they_are() -> None:
    body = b'{"a":"' + b"x" * (2 * PIECE_BYTES) + b'","b":"%b"}'
    assert decode_body(body % (b"," * (MAX_MARKS - 2)), MAX_CHARS)["b"] == "," * (MAX_MARKS - 2)
    with pytest.raises(BadRequest, match="too many JSON values"):
        decode_body(body % (b"," * MAX_MARKS), MAX_CHARS)


def test_large_pictures_and_texts_are_taken() -> None:
    picture, text = "A" * (8 << 20), "Well, yes: [1, 2], {3}. " * (MAX_CHARS // 40)
    assert decode_body(f'{{"picture": "{picture}", "text": "{text}"}}'.encode(), MAX_CHARS) == {
        "picture": picture,
        "text": text,
    }
