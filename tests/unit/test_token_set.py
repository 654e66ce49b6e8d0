"""A set of token ids as bits comes back as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.token_set import token_ids_of, token_set


@given(st.lists(st.integers(0, 5000), max_size=200))
def test_a_token_set_comes_back(token_ids: list[int]) -> None:
    assert token_ids_of(token_set(token_ids)) == sorted(set(token_ids))


def test_the_size_is_that_of_the_vocabulary() -> None:
    assert len(token_set([151_935])) == 18_992
    assert token_set([]) == b""
