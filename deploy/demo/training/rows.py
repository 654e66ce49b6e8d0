"""One row of training: pictures, and many questions about them that don't see each other.

Every question begins at the same position, right after the pictures, so that the row equals as many separate prompts.
Some rows are a conversation of a few turns instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from training.pictures import Picture, draw
from training.tokenizer import END_TOKEN, IMAGE_TOKEN, SYSTEM_PROMPT
from triptych.loadgen.world import (
    MANY_PICTURES,
    ONE_PICTURE,
    TASKS,
    TEXT,
    Question,
    Scene,
    ask_many,
    ask_one,
    ask_text,
    make_scene,
    multi_scenes,
    pick_tasks,
)
from triptych.shared.checkpoint import ImageOptions

NUM_QUESTIONS = {"one": 10, "many": 7, "text": 12}  # in a row of a kind; chosen: about as many tokens as the pictures
_CONVERSATION_SHARE = 0.08  # of the rows; chosen
_NUM_TURNS = 3  # of a conversation; chosen
_SYSTEM_SHARE = 0.25  # of the rows begin with a system message; chosen
_CACHE_SIZE = 100_000  # texts; chosen


@dataclass(slots=True)
class Row:
    """Token by token: token_ids, positions (time, height, width), parts (0: seen by all, k: by question k only).
    cell_at: where the pictures' tokens are. Of each answer token: answer_at, the token before it; answer_ids; questions, an
    index into tasks, which are indices into TASKS."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    cell_at: list[range] = field(default_factory=list)
    answer_at: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)


class RowWriter:
    """Writes rows as the chat template would; keeps what texts were tokenized to."""

    def __init__(self, tokenizer: Tokenizer, options: ImageOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._token_ids: dict[str, list[int]] = {}
        self._row, self._position, self._part = Row(), 0, 0

    def write(self, kind: str, task_weights: dict[str, float], rng: np.random.Generator, held_out: bool = False) -> Row:
        """A row of a kind of Mix.num_rows."""
        self._row, self._position, self._part = Row(), 0, 0
        if kind == "cells":
            self._row.pictures.append(draw(make_scene(rng), self._options, rng))
            return self._row
        if rng.random() < _SYSTEM_SHARE:
            self._add(self.encode(f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"))
        self._add(self.encode("<|im_start|>user\n"))
        scenes = [make_scene(rng)] if kind == "one" else multi_scenes(rng) if kind == "many" else []
        for scene in scenes:
            self._add_picture(draw(scene, self._options, rng))
        asked = _questions(kind, scenes, task_weights, rng, held_out)
        questions = list(islice(asked, NUM_QUESTIONS[kind]))
        if rng.random() < _CONVERSATION_SHARE:
            self._add_turns(questions[:_NUM_TURNS])
        else:
            self._add_separate(questions)
        return self._row

    def encode(self, text: str) -> list[int]:
        if text not in self._token_ids:
            if len(self._token_ids) >= _CACHE_SIZE:
                self._token_ids.clear()
            self._token_ids[text] = self._tokenizer.encode(text).ids
        return self._token_ids[text]

    def _add(self, token_ids: Sequence[int]) -> None:
        row, start = self._row, self._position
        row.token_ids += token_ids
        row.positions += [(position,) * 3 for position in range(start, start + len(token_ids))]
        row.parts += [self._part] * len(token_ids)
        self._position += len(token_ids)

    def _add_picture(self, picture: Picture) -> None:
        row = self._row
        row.pictures.append(picture)
        self._add(self.encode(f"Picture {len(row.pictures)}: ") + self.encode("<|vision_start|>"))
        start, num_cells = self._position, picture.rows * picture.columns
        row.cell_at.append(range(len(row.token_ids), len(row.token_ids) + num_cells))
        row.token_ids += self.encode(IMAGE_TOKEN) * num_cells
        row.positions += [(start, start + y, start + x) for y in range(picture.rows) for x in range(picture.columns)]
        row.parts += [0] * num_cells
        self._position += max(picture.rows, picture.columns)
        self._add(self.encode("<|vision_end|>"))

    def _add_separate(self, questions: Sequence[Question]) -> None:
        start = self._position
        for question in questions:
            self._part += 1
            self._position = start
            self._add_question(question)

    def _add_turns(self, questions: Sequence[Question]) -> None:
        for turn, question in enumerate(questions):
            if turn:
                self._add(self.encode("\n<|im_start|>user\n"))
            self._add_question(question)

    def _add_question(self, question: Question) -> None:
        row = self._row
        self._add(self.encode(question.text) + self.encode("<|im_end|>\n<|im_start|>assistant\n"))
        answer = self.encode(question.answer) + self.encode(END_TOKEN)
        before = len(row.token_ids) - 1
        row.answer_at += range(before, before + len(answer))
        row.answer_ids += answer
        row.questions += [len(row.tasks)] * len(answer)
        row.tasks.append(TASKS.index(question.task))
        self._add(answer)


def _questions(
    kind: str, scenes: list[Scene], task_weights: dict[str, float], rng: np.random.Generator, held_out: bool
) -> Iterator[Question]:
    """Without end; tasks that don't suit the scenes are left out."""
    tasks = {"one": ONE_PICTURE, "many": MANY_PICTURES, "text": TEXT}[kind]
    weights = {task: weight * task_weights.get(task, 1.0) for task, weight in tasks.items()}
    while True:
        for task in pick_tasks(weights, NUM_QUESTIONS[kind], rng):
            if kind == "text":
                yield ask_text(task, rng, held_out)
            elif question := ask_one(scenes[0], task, rng) if kind == "one" else ask_many(scenes, task, rng):
                yield question
