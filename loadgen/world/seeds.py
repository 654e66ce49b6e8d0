"""Where all randomness of the world comes from: one generator per seed, in two namespaces that never meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_TRAINING, _HELD_OUT = 1, 2
Item = TypeVar("Item")


def generator(*seed: int, held_out: bool = False) -> np.random.Generator:
    """The generator of a seed; one for training gives other pictures than any of the held-out questions.
    Seeds that differ only in zeros at the end are the same: numpy fills up with them to four numbers, ours among them."""
    return np.random.default_rng([_HELD_OUT if held_out else _TRAINING, *seed])


def pick(items: Sequence[Item], rng: np.random.Generator) -> Item:
    return items[int(rng.integers(len(items)))]
