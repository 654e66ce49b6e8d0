"""Words: texts of exact length that are equal as far as their names say, and no further."""

from __future__ import annotations

import json

import pytest

from triptych.loadgen.replay.words import NUM_WORDS, Words, name_in_words


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(seed=0)


def said(words: Words, name: int, num_words: int) -> list[str]:
    text = b"".join(words.text(name, num_words)).decode()
    assert json.loads(f'"{text}"') == text
    return text.split()


@pytest.mark.parametrize("num_words", [1, 2, 7, 500, NUM_WORDS - 1, NUM_WORDS, 2 * NUM_WORDS + 5])
@pytest.mark.parametrize("name", [0, 1, 58, 65_535, 1 << 41])
def test_a_text_has_as_many_words_as_asked_for(words: Words, name: int, num_words: int) -> None:
    assert len(said(words, name, num_words)) == num_words


def test_a_shorter_text_is_the_beginning_of_a_longer_one(words: Words) -> None:
    assert said(words, 7, 1000)[:300] == said(words, 7, 300)


def test_texts_of_other_names_differ_from_the_beginning(words: Words) -> None:
    beginnings = {tuple(said(words, name, 8)[: len(name_in_words(name))]) for name in range(5000)}
    assert len(beginnings) == 5000


def test_no_name_is_the_beginning_of_another() -> None:
    names = [tuple(name_in_words(name)) for name in range(4000)]
    whole = set(names)
    assert len(whole) == 4000
    assert not any(name[:length] in whole for name in names for length in range(1, len(name)))


def test_another_seed_says_something_else() -> None:
    assert said(Words(1), 3, 50) != said(Words(2), 3, 50)
    assert said(Words(1), 3, 50) == said(Words(1), 3, 50)
