"""Which chunk of a stream brings the first token."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.loadgen.client import brings_token


def chunk(content: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"role": "assistant", "content": content}, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(
    ("read", "is_one"),
    [
        (chunk(None), False),
        (chunk(""), False),
        (chunk("red"), True),
        (chunk("", "length"), True),  # a token without text
        ({"choices": [], "usage": {"prompt_tokens": 3}}, False),
    ],
)
def test_a_token_is_text_or_the_end(read: dict[str, Any], is_one: bool) -> None:
    assert brings_token(read) is is_one
