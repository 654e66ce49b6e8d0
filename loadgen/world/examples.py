"""Whole examples (pictures, question, answer), chance levels, and text for the tokenizer."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from triptych.loadgen.world.picture import pick_size, render
from triptych.loadgen.world.questions import Question, ask_many, ask_one
from triptych.loadgen.world.scene import Scene, make_scene, multi_scenes
from triptych.loadgen.world.seeds import generator
from triptych.loadgen.world.tasks import ONE_PICTURE, TASKS, TEXT
from triptych.loadgen.world.text import MEMORISED, ask_text

_NUM_MEASURED = 1000  # questions behind a chance level: mostly within 0.03 of the truth


@dataclass(frozen=True, slots=True)
class Example:
    """A question with the pictures that it is about."""

    question: Question
    pictures: tuple[Image.Image, ...]


def make_example(task: str, rng: np.random.Generator, held_out: bool = False) -> Example:
    """A random example of the task."""
    question, scenes = _ask(task, rng, held_out)
    return Example(question, tuple(render(scene, *pick_size(rng), rng)[0] for scene in scenes))


def held_out_examples(task: str, count: int, seed: int = 0) -> Iterator[Example]:
    """`count` examples (1000 at most) that training never sees, no two the same; MEMORISED tasks promise neither."""
    asked: set[str] = set()
    indices = itertools.count()
    while count:
        example = make_example(task, generator(seed, TASKS.index(task), next(indices), held_out=True), held_out=True)
        again = task in TEXT and task not in MEMORISED and example.question.text in asked
        if not again:
            asked.add(example.question.text)
            count -= 1
            yield example


@functools.cache
def chance(task: str) -> float:
    """How often the best answer that looks at nothing is right: the most frequent one's share, measured."""
    rng = generator(TASKS.index(task))
    answers = Counter(_ask(task, rng, held_out=False)[0].answer for _ in range(_NUM_MEASURED))
    return max(answers.values()) / _NUM_MEASURED


def corpus(count: int = 4000, seed: int = 0) -> Iterator[str]:
    """Text for the tokenizer: questions and answers, `count` of each task."""
    rng = generator(seed)
    for _, task in itertools.product(range(count), TASKS):
        question, _ = _ask(task, rng, held_out=False)
        yield question.text
        yield question.answer


def _ask(task: str, rng: np.random.Generator, held_out: bool) -> tuple[Question, list[Scene]]:
    if task in TEXT:
        return ask_text(task, rng, held_out), []
    while True:
        scenes = [make_scene(rng)] if task in ONE_PICTURE else multi_scenes(rng)
        question = ask_one(scenes[0], task, rng) if task in ONE_PICTURE else ask_many(scenes, task, rng)
        if question is not None:
            return question, scenes
