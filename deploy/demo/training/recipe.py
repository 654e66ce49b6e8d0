"""What is trained, on how much of what, how fast: the one place with numbers to turn."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from training.optimizer import LearningRates

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model: the text model first, vision_* after."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    rope_theta: float = 100.0  # low: prompts are short, heads narrow
    vision_hidden_size: int = 128
    vision_intermediate_size: int = 256
    vision_depth: int = 4
    vision_num_heads: int = 4
    min_pixels: int = 196 * 196  # smaller pictures are enlarged, to see thin lines, larger ones shrunk, to save time
    max_pixels: int = 224 * 224


@dataclass(frozen=True, slots=True)
class Mix:
    """num_rows: rows in a step of each kind: "cells" (a picture, no text), "one" (a picture and questions), "many" (2 or 3
    pictures and questions), "text". task_weights: how often a task is asked, times the world's weight; 1 unless named."""

    num_rows: dict[str, int]
    task_weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase:
    """num_steps of this mix at these rates, beginning with a fresh optimizer. cell_weight: weight of the losses on the cells
    at the start and at the end of the phase. falls: rates go down to 0 over the second half."""

    num_steps: int
    mix: Mix
    rates: LearningRates
    num_rising_steps: int
    falls: bool = True
    cell_weight: tuple[float, float] = (1.0, 1.0)

    def rate_scale(self, step: int) -> float:
        left = 1 - step / self.num_steps
        return min(1.0, (step + 1) / self.num_rising_steps, max(0.02, 2 * left) if self.falls else 1.0)

    def cell_weight_at(self, step: int) -> float:
        start, end = self.cell_weight
        return start + (end - start) * step / self.num_steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """Phases run in order: vision alone learns to tell what each cell shows (through answers only, it would sit on a plateau
    for very long), then all of the model learns to answer, at last mostly the tasks that are slow to learn."""

    model: ModelShape
    phases: dict[str, Phase]

    def changed(self, changes: dict[str, Any]) -> Recipe:
        """The recipe with some values changed: {"model": {"num_layers": 4}, "phases": {"see": {"num_steps": 10}}}."""
        return _changed(self, changes)


def _changed(value: T, changes: Any) -> T:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _changed(getattr(value, name), change) for name, change in changes.items()}
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict) and any(dataclasses.is_dataclass(item) for item in value.values()):
        return type(value)({**value, **{key: _changed(value[key], change) for key, change in changes.items()}})
    return type(value)(changes)  # type: ignore[call-arg]


# What is slow to learn, and what is quick
_LATE_WEIGHTS = {
    "color_of": 0.8,
    "shape_of": 0.6,
    "count": 0.4,
    "where": 1.8,
    "list": 1.4,
    "one_picture": 0.3,
    "pictures": 0.5,
    "which": 0.0,  # never left the level of chance, in twice as many steps either
    "have_shape": 1.0,
    "have_color": 1.0,
    "count_in": 0.5,
    "list_in": 1.5,
    "day": 0.3,
    "larger": 1.5,
    "repeat": 0.6,
    "sort": 1.5,
    "add": 0.6,
}
STANDARD = Recipe(
    ModelShape(),
    {
        "see": Phase(
            num_steps=1400,
            mix=Mix({"cells": 24}),
            rates=LearningRates(muon_vision=0.02, muon_text=0.02, adamw=1e-3),
            num_rising_steps=50,
        ),
        "answer": Phase(
            num_steps=550,
            mix=Mix({"one": 6, "many": 4, "text": 3}),
            rates=LearningRates(muon_vision=0.004, muon_text=0.008, adamw=1e-3),
            num_rising_steps=80,
            falls=False,
            cell_weight=(1.0, 0.4),
        ),
        "polish": Phase(
            num_steps=1350,
            mix=Mix({"one": 5, "many": 6, "text": 2}, _LATE_WEIGHTS),
            rates=LearningRates(muon_vision=0.004, muon_text=0.008, adamw=1e-3),
            num_rising_steps=80,
            cell_weight=(0.4, 0.0),
        ),
    },
)
