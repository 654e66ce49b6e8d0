"""The demo checkpoint that ships answers right, in plain transformers: held-out questions and hand-drawn pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from evaluation.answering import Answerer
from evaluation.scores import MIN_ACCURACY, score_drawings

from triptych.loadgen.world import ADVERTISED, held_out_examples

CHECKPOINT = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
NUM_QUESTIONS = 2  # of each task; evaluate.py asks hundreds
SEED = 3  # not the card's


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(CHECKPOINT)


def test_held_out_questions(answerer: Answerer) -> None:
    examples = [example for task in ADVERTISED for example in held_out_examples(task, NUM_QUESTIONS, SEED)]
    said = answerer.answers(examples)
    wrong = [
        f"{example.question}: {answer!r}"
        for example, answer in zip(examples, said, strict=True)
        if answer != example.question.answer
    ]
    assert 1 - len(wrong) / len(examples) >= MIN_ACCURACY, "\n".join(wrong)


def test_drawings_by_hand(answerer: Answerer) -> None:
    score = score_drawings(answerer)
    print(f"drawings: {score.num_right} of {score.num_asked} right")
    assert score.accuracy >= MIN_ACCURACY, "\n".join(map(str, score.misses))


def test_enough_tasks_ship() -> None:
    """At least 7 about one picture, 5 about several and 5 with text alone."""
    num_pictures = {task: len(next(held_out_examples(task, 1)).pictures) for task in ADVERTISED}
    kinds = Counter(min(count, 2) for count in num_pictures.values())
    assert (kinds[1] >= 7, kinds[2] >= 5, kinds[0] >= 5) == (True, True, True), kinds
