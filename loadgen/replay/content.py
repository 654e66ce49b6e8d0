"""What a replayed request says: a text as long as the trace has it, or a question of the world whose answer is known.

Made when the request is sent, in well under a millisecond: texts are slices, pictures are variants of drawings.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.loadgen.replay.pictures import Picture, PicturePool
from triptych.loadgen.replay.token_costs import TokenCosts
from triptych.loadgen.replay.words import Piece, Words
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.world import (
    ADVERTISED,
    MANY_PICTURES,
    ONE_PICTURE,
    TEXT,
    Question,
    ask_many,
    ask_one,
    ask_text,
    generator,
)
from triptych.loadgen.world.seeds import pick

MAX_ANSWER_TOKENS = 64  # chosen: the world's answers are far shorter
FIT_MARGIN = 0.05  # of the context's length: how far a prompt may be off the length that was wanted; chosen
NAMED = 1  # behind a picture's name, where the seeds of rows' own pictures have nothing
_TASKS = {0: [*TEXT], 1: [task for task in ONE_PICTURE if task in ADVERTISED]}


@dataclass(frozen=True, slots=True)
class Message:
    """A user's message as pieces of JSON. is_forced: the answer is to be exactly max_tokens long, whatever it says. answer: the
    right one, where it is known. begins_anew: the earlier turns leave it no room, and are not repeated."""

    pieces: tuple[Piece, ...]
    num_images: int
    max_tokens: int
    is_forced: bool = False
    answer: str | None = None
    begins_anew: bool = False


class Content(Protocol):
    """keeps_history: whether a later turn of a session repeats the earlier ones."""

    keeps_history: bool

    def message(self, index: int, row: TraceRow, num_history_tokens: int) -> Message:
        """The message of the request at this index, the same for the same seed; the prompt begins with num_history_tokens of
        earlier turns, unless the message says otherwise."""
        ...


class WorldContent:
    """Questions about as many pictures as the row has, and their answers. Lengths are the questions' own, and each turn of a
    session is asked alone: that is what the demo model knows."""

    keeps_history = False

    def __init__(self, pool: PicturePool | None, seed: int) -> None:
        self._pool = pool
        self._seed = seed

    def message(self, index: int, row: TraceRow, num_history_tokens: int) -> Message:
        rng = generator(self._seed, index, held_out=True)
        tasks = _TASKS.get(row.num_images, [*MANY_PICTURES])
        pictures = [_pool(self._pool).pick(rng, is_simple=row.num_images > 1) for _ in range(row.num_images)]
        scenes = [picture.scene for picture in pictures]
        question: Question | None = None
        while question is None:  # a task that does not suit the scenes
            task = pick(tasks, rng)
            if not scenes:
                question = ask_text(task, rng, held_out=True)
            else:
                question = ask_one(scenes[0], task, rng) if len(scenes) == 1 else ask_many(scenes, task, rng)
        text = json.dumps(question.text)[1:-1].encode()
        return Message(user_message((), pictures, (text,)), row.num_images, MAX_ANSWER_TOKENS, answer=question.answer)


class TraceContent:
    """Words and pictures that fill a prompt to the row's length; blocks of equal prefix_ids are equal texts, pictures of equal
    image_ids equal pictures.

    Args:
        is_natural: the model ends its answer where it likes, at the row's length at the latest.
    """

    keeps_history = True

    def __init__(self, words: Words, pool: PicturePool | None, costs: TokenCosts, seed: int, is_natural: bool = False) -> None:
        self._words = words
        self._pool = pool
        self._costs = costs
        self._seed = seed
        self._is_natural = is_natural
        self.num_cut = 0  # requests that were too long for the model
        self.num_longer = 0  # than the trace has them: what is not text of their own takes more

    def message(self, index: int, row: TraceRow, num_history_tokens: int) -> Message:
        fitted = self._fitted(row, self._pictures(index, row), num_history_tokens)
        num_text_tokens = fitted.num_context_tokens - fitted.num_history_tokens - self._num_fixed_tokens(fitted.pictures)
        self.num_longer += num_text_tokens < 0
        num_words = max(1, round(num_text_tokens / self._costs.per_word))
        shared = () if fitted.num_history_tokens else tuple(self._shared(row, num_words))
        num_shared_words = min(num_words, len(row.prefix_ids) * self._block_words(row)) if shared else 0
        own = self._words.text(2 * index, num_words - num_shared_words) if num_words > num_shared_words else ()
        return Message(
            user_message(shared, fitted.pictures, own),
            len(fitted.pictures),
            fitted.num_output_tokens,
            is_forced=not self._is_natural,
            begins_anew=fitted.num_history_tokens < num_history_tokens,
        )

    def _pictures(self, index: int, row: TraceRow) -> list[Picture]:
        if not row.num_images:
            return []  # most requests: a generator costs more than their text
        num_tokens = row.num_image_tokens
        num_pixels = None if num_tokens is None else self._costs.pixels_of(num_tokens / row.num_images)
        own = generator(self._seed, index)
        named = [generator(self._seed, name, NAMED) for name in row.image_ids]
        return [_pool(self._pool).pick(rng, num_pixels=num_pixels) for rng in named or [own] * row.num_images]

    def _shared(self, row: TraceRow, num_words: int) -> Iterator[Piece]:
        """The blocks that the prompt begins with. Their names are odd numbers, those of texts that nobody shares are even."""
        left = num_words
        for block in row.prefix_ids:
            if left <= 0:
                return
            yield from self._words.text(2 * block + 1, min(left, self._block_words(row)))
            left -= self._block_words(row)

    def _block_words(self, row: TraceRow) -> int:
        return max(1, round(row.prefix_block_size / self._costs.per_word))

    def _fitted(self, row: TraceRow, pictures: Sequence[Picture], num_history_tokens: int) -> _Fitted:
        """Cut to what the model takes, if it says so: earlier turns are forgotten before pictures are left out."""
        num_context, num_output = row.num_context_tokens, max(1, row.num_output_tokens)
        limit = self._costs.max_model_len or sys.maxsize
        num_most = int(limit * (1 - FIT_MARGIN))
        num_beside_text = num_history_tokens + self._num_fixed_tokens(pictures)
        if max(num_context, num_beside_text) + num_output > num_most:
            self.num_cut += 1
            num_output = min(num_output, limit // 2)
            num_most -= num_output
            num_context = min(num_context, num_most)
            if num_beside_text > num_most:
                num_history_tokens = 0
            while pictures and self._num_fixed_tokens(pictures) > num_most:
                pictures = pictures[:-1]
        return _Fitted(pictures, num_history_tokens, num_context, num_output)

    def _num_fixed_tokens(self, pictures: Sequence[Picture]) -> float:
        """Of a prompt without words, and without earlier turns."""
        return self._costs.per_request + sum(self._costs.of_picture(picture.width * picture.height) for picture in pictures)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """What the model takes of a row, in tokens. num_context_tokens: all of the prompt."""

    pictures: Sequence[Picture]
    num_history_tokens: int
    num_context_tokens: int
    num_output_tokens: int


def _pool(pool: PicturePool | None) -> PicturePool:
    assert pool is not None, "a row with pictures, and none was drawn"
    return pool


def user_message(before: Iterable[Piece], pictures: Sequence[Picture], after: Iterable[Piece]) -> tuple[Piece, ...]:
    """A user's message: text, pictures, text."""
    if not pictures:
        return (b'{"role":"user","content":"', *before, *after, b'"}')
    parts = [_text_part(pieces) for pieces in (tuple(before),) if pieces]
    parts += [
        (b'{"type":"image_url","image_url":{"url":"data:image/png;base64,', *picture.png64, b'"}}') for picture in pictures
    ]
    parts += [_text_part(pieces) for pieces in (tuple(after),) if pieces]
    joined = itertools.chain.from_iterable((b",", *part) for part in parts)
    next(joined)  # the first comma
    return (b'{"role":"user","content":[', *joined, b"]}")


def _text_part(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return (b'{"type":"text","text":"', *pieces, b'"}')
