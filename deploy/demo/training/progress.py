"""The line of progress: averages since the last line, and the time left."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from training.losses import Score
from training.pictures import CELL_LABELS
from triptych.loadgen.world import TASKS


class Meter:
    """Adds up on the device, and waits for it only when a line is wanted."""

    def __init__(self, phase: str, first_step: int, num_steps: int) -> None:
        self._phase, self._first_step, self._num_steps = phase, first_step, num_steps
        self._started_s = time.monotonic()
        self._losses: list[Tensor] = []
        self._cells: list[Tensor] = []
        self._scores: list[Score] = []

    def add(self, loss: Tensor, cell_accuracies: Tensor, score: Score | None) -> None:
        self._losses.append(loss)
        self._cells.append(cell_accuracies)
        if score:
            self._scores.append(score)

    def line(self, num_done: int) -> str:
        """Such as "answer 100/700, 1.1 s a step, 9 min left of the phase | loss 0.912 | cells kind 0.98 ... | all 0.71 ..."."""
        step_s = (time.monotonic() - self._started_s) / (num_done - self._first_step)
        left_min = (self._num_steps - num_done) * step_s / 60
        parts = [
            f"{self._phase} {num_done}/{self._num_steps}, {step_s:.3f} s a step, {left_min:.1f} min left of the phase",
            f"loss {torch.stack(self._losses).mean().item():.3f}",
            "cells " + _shares(list(CELL_LABELS), torch.stack(self._cells).nanmean(0).tolist()),
        ]
        if self._scores:
            parts.append(score_line(Score(*(torch.stack(counts).sum(0) for counts in zip(*self._scores, strict=True)))))
        self._losses, self._cells, self._scores = [], [], []
        return " | ".join(parts)


def score_line(score: Score) -> str:
    """The share of right answers, over all and of each task."""
    right, asked = score.right.cpu(), score.asked.cpu()
    shares = (right / asked).tolist()
    known = [(task, share) for task, share in zip(TASKS, shares, strict=True) if share == share]
    return f"all {right.sum() / asked.sum():.3f} " + _shares([task for task, _ in known], [share for _, share in known])


def _shares(names: list[str], shares: list[float]) -> str:
    return " ".join(f"{name} {share:.2f}" for name, share in zip(names, shares, strict=True))
