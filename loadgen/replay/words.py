"""Texts of any number of words without copying: slices of one long text that is made once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from triptych.loadgen.world import generator
from triptych.loadgen.world.text import WORDS

Piece = bytes | memoryview
NUM_WORDS = 1 << 16  # chosen: 400 KB, and two texts of the same seed rarely begin at the same word


class Words:
    """`text` gives pieces that make one text when joined: plain words, each with a space after it, nothing that JSON escapes.

    Two texts of different names differ from their first words on, so that no server can reuse one's KV cache for the other.
    """

    def __init__(self, seed: int) -> None:
        picked = generator(seed).integers(len(WORDS), size=NUM_WORDS).tolist()
        words = [f"{WORDS[number]} ".encode() for number in picked]
        self._starts = [0, *itertools.accumulate(map(len, words))]
        self._all = memoryview(b"".join(words))

    def text(self, name: int, num_words: int) -> Iterator[Piece]:
        """The text of this name (0 or more), cut to so many words: a shorter one of the same name is its beginning."""
        head = name_in_words(name)[:num_words]
        yield b"".join(head)
        at, left = (name * 40_503) % NUM_WORDS, num_words - len(head)  # 40503: Knuth's multiplicative hash for 16 bits
        while left > 0:
            taken = min(left, NUM_WORDS - at)
            yield self._all[self._starts[at] : self._starts[at + taken]]
            at, left = 0, left - taken


def name_in_words(name: int) -> list[bytes]:
    """The number, written with words for digits; ends with a word that is no digit, so that no name is another's beginning."""
    digits = []
    while name:
        name, digit = divmod(name, len(WORDS) - 1)
        digits.append(f"{WORDS[digit]} ".encode())
    return [*digits, f"{WORDS[-1]} ".encode()]
