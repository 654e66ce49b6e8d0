"""Batches: rows packed side by side into arrays of one length, and a stream of them made in worker processes.

A batch is a function of the seed, the phase and the step.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from training.pictures import Picture
from training.recipe import Mix
from training.rows import Row, RowWriter
from triptych.loadgen.world import CELL_PX, generator

Array = TypeVar("Array")
Numpy = npt.NDArray[Any]

_WINDOW_CELLS = 112 // CELL_PX  # a side of an attention window of the vision tower, as in Qwen2.5-VL
_CELL_PATCHES = np.arange(4)  # 2 x 2, in the order of the processor
_ALIGNMENT = 8  # tokens; attention kernels of a GPU want the rows of a mask to begin at multiples of it
_NUM_READY = 4  # batches that each worker has ready, at most; chosen


@dataclass(frozen=True, slots=True)
class Batch(Generic[Array]):
    """numpy arrays where it is made, tensors where it is used. N patches, C cells, R lines, L tokens, A answer tokens.

    Pictures, in order of size: pixels [N, RGB x patch]; patch_yx [2, N]; windows [N], the patches in order of window;
    *_lengths, (patches of one, how many in succession); labels [C, CELL_LABELS]; cell_at [C], where in the lines;
    picture_number [C], from 0 in its row. Lines [R, L]: token_ids; positions [3, R, L]; row_index (-1: padding); part_index
    (Row.parts). Answers [A]: answer_at, where in the lines; answer_ids; question, an index into tasks."""

    pixels: Array
    patch_yx: Array
    windows: Array
    window_lengths: list[tuple[int, int]]
    picture_lengths: list[tuple[int, int]]
    labels: Array
    cell_at: Array
    picture_number: Array
    token_ids: Array
    positions: Array
    row_index: Array
    part_index: Array
    answer_at: Array
    answer_ids: Array
    question: Array
    tasks: Array

    def on(self, device: torch.device) -> Batch[torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        return Batch(**values | {name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def pack(rows: list[Row]) -> Batch[Numpy]:
    """Rows that together are no longer than the longest one share a line."""
    starts, num_lines, length = _places([len(row.token_ids) for row in rows])
    tokens = {name: np.zeros(num_lines * length, np.int64) for name in ("token_ids", "row_index", "part_index")}
    tokens["row_index"][:] = -1
    positions = np.zeros((3, num_lines * length), np.int64)
    pictures: list[tuple[Picture, int, Numpy]] = []
    answers: dict[str, list[int]] = {"answer_at": [], "answer_ids": [], "question": [], "tasks": []}
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        line = slice(start, start + len(row.token_ids))
        tokens["token_ids"][line], tokens["part_index"][line] = row.token_ids, row.parts
        tokens["row_index"][line] = index
        positions[:, line] = np.reshape(row.positions, (-1, 3)).T
        for number, picture in enumerate(row.pictures):
            at = np.array(row.cell_at[number] if row.cell_at else (), np.int64) + start
            pictures.append((picture, number, at))
        answers["answer_at"] += [start + at for at in row.answer_at]
        answers["answer_ids"] += row.answer_ids
        answers["question"] += [len(answers["tasks"]) + question for question in row.questions]
        answers["tasks"] += row.tasks
    arrays = _picture_arrays(pictures)
    arrays |= {name: array.reshape(num_lines, length) for name, array in tokens.items()}
    arrays |= {name: np.array(values, np.int64) for name, values in answers.items()}
    return Batch(**arrays, positions=positions.reshape(3, num_lines, length))


def _places(lengths: list[int]) -> tuple[list[int], int, int]:
    """Where each row starts in the flattened lines, how many lines, their length. The longest first, where it fits first."""
    capacity = max(lengths) + -max(lengths) % _ALIGNMENT
    used: list[int] = []
    starts = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        line = next((line for line, num_used in enumerate(used) if num_used + lengths[index] <= capacity), len(used))
        if line == len(used):
            used.append(0)
        starts[index] = line * capacity + used[line]
        used[line] += lengths[index]
    return starts, len(used), capacity


def _picture_arrays(pictures: list[tuple[Picture, int, Numpy]]) -> dict[str, Any]:
    pictures = sorted(pictures, key=lambda item: len(item[0].pixels))
    windows, patch_yx, offset = [], [], 0
    for picture, _, _ in pictures:
        of_picture, yx = _layout(picture.columns, picture.rows)
        windows += [window + offset for window in of_picture]
        patch_yx.append(yx)
        offset += len(picture.pixels)
    windows.sort(key=len)
    return {
        "pixels": np.concatenate([picture.pixels for picture, _, _ in pictures]),
        "patch_yx": np.concatenate(patch_yx, 1),
        "windows": np.concatenate(windows),
        "window_lengths": sorted(Counter(map(len, windows)).items()),
        "picture_lengths": sorted(Counter(len(picture.pixels) for picture, _, _ in pictures).items()),
        "labels": np.concatenate([picture.labels for picture, _, _ in pictures]),
        "cell_at": np.concatenate([at for _, _, at in pictures]),
        "picture_number": np.concatenate([np.full(len(picture.labels), number) for picture, number, _ in pictures]),
    }


@functools.cache
def _layout(columns: int, rows: int) -> tuple[list[Numpy], Numpy]:
    """The patches of each window, and y and x of each patch. Patches go cell by cell: 2 x 2 of them each."""
    cells = np.arange(columns * rows).reshape(rows, columns)
    corners = [(y, x) for y in range(0, rows, _WINDOW_CELLS) for x in range(0, columns, _WINDOW_CELLS)]
    windows = [cells[y : y + _WINDOW_CELLS, x : x + _WINDOW_CELLS].reshape(-1, 1) * 4 + _CELL_PATCHES for y, x in corners]
    y, x = np.arange(rows * 2).reshape(rows, 1, 2, 1), np.arange(columns * 2).reshape(1, columns, 1, 2)
    patch_yx = np.stack([np.broadcast_to(axis, (rows, columns, 2, 2)).reshape(-1) for axis in (y, x)])
    return [window.reshape(-1) for window in windows], patch_yx


@dataclass(frozen=True, slots=True)
class Source:
    """Makes the batch of a step: rows of the mix, by a generator of (seeds, step)."""

    writer: RowWriter
    mix: Mix
    seeds: tuple[int, ...]
    held_out: bool = False

    def batch(self, step: int) -> Batch[Numpy]:
        rng = generator(*self.seeds, step, held_out=self.held_out)
        kinds = [kind for kind, count in self.mix.num_rows.items() for _ in range(count)]
        return pack([self.writer.write(kind, self.mix.task_weights, rng, self.held_out) for kind in kinds])


class _Steps(Dataset[Batch[Numpy]]):
    """Some steps, as torch's workers want them."""

    def __init__(self, source: Source, steps: range) -> None:
        self._source, self._steps = source, steps

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Batch[Numpy]:
        return self._source.batch(self._steps[index])


def stream(source: Source, steps: range, num_workers: int) -> Iterator[Batch[Numpy]]:
    """The batches of the steps, in order, made ahead by num_workers processes (0: by this one, when asked)."""
    ahead = _NUM_READY if num_workers else None
    return iter(DataLoader(_Steps(source, steps), batch_size=None, num_workers=num_workers, prefetch_factor=ahead))
