"""What training minimizes, and how often the model is right. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.batches import Batch
from training.pictures import CELL_LABELS
from triptych.loadgen.world import TASKS

_BACKGROUND_WEIGHT = 0.25  # chosen: most cells show no shape


class Score(NamedTuple):
    """Of each task: questions answered right, and asked."""

    right: Tensor
    asked: Tensor


def answer_loss(logits: Tensor, batch: Batch[Tensor]) -> Tensor:
    """Every question weighs the same, however long its answer is: else one-word answers starve."""
    losses = F.cross_entropy(logits, batch.answer_ids, reduction="none")
    num_tokens = torch.zeros(len(batch.tasks), device=logits.device).index_add(0, batch.question, torch.ones_like(losses))
    return (losses / num_tokens[batch.question]).sum() / len(batch.tasks)


def cell_loss(label_logits: Tensor, batch: Batch[Tensor]) -> tuple[Tensor, Tensor]:
    """Summed over the kinds of labels; and how often each is right where a shape is, [CELL_LABELS]."""
    has_shape = batch.labels[:, 0] > 0
    weights = torch.where(has_shape, 1.0, _BACKGROUND_WEIGHT)
    losses, accuracies = [], []
    for logits, wanted in zip(torch.split(label_logits, list(CELL_LABELS.values()), -1), batch.labels.T, strict=True):
        losses.append((F.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum())
        accuracies.append(((logits.argmax(-1) == wanted) & has_shape).sum() / has_shape.sum())
    return torch.stack(losses).sum(), torch.stack(accuracies).detach()


def whereabouts_loss(number_logits: Tensor, place_logits: Tensor, batch: Batch[Tensor]) -> Tensor:
    """Of which picture a cell is, and at which place a cell that shows a shape: the vision tower sees no more than one
    picture, and hardly its edges."""
    number = F.cross_entropy(number_logits, batch.picture_number)
    places = batch.labels[:, list(CELL_LABELS).index("place")]
    shows = places > 0
    losses = F.cross_entropy(place_logits, places, reduction="none") * shows
    return number + losses.sum() / shows.sum().clamp(min=1)


def score(logits: Tensor, batch: Batch[Tensor]) -> Score:
    """A question is right when each of its answer tokens, the end token too, is the likeliest one: greedy decoding then gives
    the answer."""
    correct = (logits.argmax(-1) == batch.answer_ids).float()
    right = torch.ones(len(batch.tasks), device=logits.device).scatter_reduce(0, batch.question, correct, "amin")
    none = torch.zeros(len(TASKS), device=logits.device)
    return Score(none.index_add(0, batch.tasks, right), none.index_add(0, batch.tasks, torch.ones_like(right)))
