"""How often answers are exactly right: on held-out questions of each task, and about the tests' hand-drawn pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evaluation.answering import Answerer
from triptych.loadgen.world import ADVERTISED, MEMORISED, Example, Question, chance, held_out_examples

MIN_ACCURACY = 0.90  # of what is advertised
_TESTS = Path(__file__).resolve().parents[3] / "tests"


@dataclass(frozen=True, slots=True)
class TaskScore:
    """chance: how often the most frequent answer is right; memorised: training saw all questions of the task."""

    task: str
    num_right: int
    num_asked: int
    chance: float
    memorised: bool
    advertised: bool

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked

    @property
    def wrongly_advertised(self) -> bool:
        return self.advertised and self.accuracy < MIN_ACCURACY


class Miss(NamedTuple):
    """A wrong answer about drawings, named."""

    drawings: tuple[str, ...]
    question: Question
    said: str


@dataclass(frozen=True, slots=True)
class DrawingScore:
    """Of the questions of advertised tasks."""

    num_asked: int
    misses: tuple[Miss, ...]

    @property
    def num_right(self) -> int:
        return self.num_asked - len(self.misses)

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked


def score_task(answerer: Answerer, task: str, count: int, seed: int) -> TaskScore:
    examples = list(held_out_examples(task, count, seed))
    said = answerer.answers(examples)
    num_right = sum(example.question.answer == answer for example, answer in zip(examples, said, strict=True))
    return TaskScore(task, num_right, count, chance(task), task in MEMORISED, task in ADVERTISED)


def score_drawings(answerer: Answerer) -> DrawingScore:
    named = list(_drawings())
    said = answerer.answers([example for _, example in named])
    misses = tuple(
        Miss(names, example.question, answer)
        for (names, example), answer in zip(named, said, strict=True)
        if answer != example.question.answer
    )
    return DrawingScore(len(named), misses)


def _drawings() -> Iterator[tuple[tuple[str, ...], Example]]:
    """Each advertised question with the names of its drawings."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    from support.drawings import DRAWINGS, QUESTIONS  # only a checkout has them

    pictures = {name: draw() for name, draw in DRAWINGS.items()}
    for asked in QUESTIONS:
        if asked.task in ADVERTISED:
            shown = tuple(pictures[name] for name in asked.drawings)
            yield asked.drawings, Example(Question(asked.task, asked.text, asked.answer), shown)
