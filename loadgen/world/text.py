"""Text-only tasks. An item of `larger`, `repeat` or `sort` belongs either to training or to the held-out questions, by a hash.

Days and sums are so few that training sees all of them: MEMORISED.
"""

from __future__ import annotations

import zlib

import numpy as np

from triptych.loadgen.world.questions import Question, say
from triptych.loadgen.world.seeds import pick

MEMORISED = ("day", "add")
HELD_OUT_SHARE = 8  # one item in so many; chosen
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WORDS = """
apple river house table mouse cloud stone bread chair light water music paper horse plant train sugar night smile dream lemon
tiger ocean field grass glass brush clock phone truck sheep snake panda robot pizza salad spoon knife plate towel shirt dress
boots scarf glove crown sword arrow castle bridge tower garden forest island valley harbor market school
"""
WORDS = tuple(_WORDS.split())


def ask_text(task: str, rng: np.random.Generator, held_out: bool = False) -> Question:
    """A question of one of TEXT's tasks; its item is never one that the other side of the split can draw."""
    while True:
        item, question = _ASK[task](rng)
        if task in MEMORISED or is_held_out(task, item) == held_out:
            return question


def is_held_out(task: str, item: str) -> bool:
    """Whether an item (the two numbers, the words, the letters: in a fixed order) is kept out of training."""
    return zlib.crc32(f"{task}: {item}".encode()) % HELD_OUT_SHARE == 0


def _day(rng: np.random.Generator) -> tuple[str, Question]:
    index = int(rng.integers(len(DAYS)))
    return DAYS[index], say("day", DAYS[(index + 1) % len(DAYS)], rng, day=DAYS[index])


def _larger(rng: np.random.Generator) -> tuple[str, Question]:
    first, second = rng.choice(100, 2, replace=False).tolist()
    item = f"{min(first, second)} {max(first, second)}"
    return item, say("larger", max(first, second), rng, first=first, second=second)


def _repeat(rng: np.random.Generator) -> tuple[str, Question]:
    words = " ".join(pick(WORDS, rng) for _ in range(int(rng.integers(1, 4))))
    return words, say("repeat", words, rng, words=words)


def _sort(rng: np.random.Generator) -> tuple[str, Question]:
    letters = [chr(ord("a") + int(index)) for index in rng.choice(26, int(rng.integers(3, 6)), replace=False)]
    in_order = " ".join(sorted(letters))
    return in_order, say("sort", in_order, rng, letters=" ".join(letters))


def _add(rng: np.random.Generator) -> tuple[str, Question]:
    first, second = rng.integers(10, size=2).tolist()
    return f"{first} {second}", say("add", first + second, rng, first=first, second=second)


_ASK = {"day": _day, "larger": _larger, "repeat": _repeat, "sort": _sort, "add": _add}
