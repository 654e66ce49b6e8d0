"""The hand-drawn pictures: other people's work, asked about as the model card says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import drawings
from support.drawings import DRAWINGS, QUESTIONS, Asked
from triptych.loadgen.world import ADVERTISED, COLORS, MANY_PICTURES, ONE_PICTURE, PLACES, SHAPES, WORDINGS

WORDS = {*COLORS, *SHAPES, "a", "an", "and", *" ".join(PLACES).split(), "yes", "no", "picture", *"0123"}


def test_there_are_twenty_of_many_sizes_and_they_do_not_use_the_world() -> None:
    assert len(DRAWINGS) == 20
    sizes = {draw().size for draw in DRAWINGS.values()}
    assert len(sizes) > 15
    assert all(112 <= side <= 448 for size in sizes for side in size)
    assert "import triptych" not in (source := Path(drawings.__file__).read_text())
    assert "from triptych" not in source


@pytest.mark.parametrize("name", DRAWINGS)
def test_each_is_asked_about(name: str) -> None:
    assert 2 <= len([asked for asked in QUESTIONS if asked.drawings == (name,)]) <= 4


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.text)
def test_questions_have_advertised_wordings(asked: Asked) -> None:
    assert asked.task in (ONE_PICTURE if len(asked.drawings) == 1 else MANY_PICTURES)
    assert all(name in DRAWINGS for name in asked.drawings)
    text = asked.text.replace("colour", "color").replace("grey", "gray")
    assert any(re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(form)), text) for form in WORDINGS[asked.task])
    assert set(asked.answer.replace(",", "").split()) <= WORDS


def test_most_advertised_tasks_are_asked() -> None:
    asked = {asked.task for asked in QUESTIONS}
    assert {*ONE_PICTURE, *MANY_PICTURES} & set(ADVERTISED) <= asked
