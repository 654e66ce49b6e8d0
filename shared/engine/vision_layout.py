"""In which order a vision tower works on patches, and which of them attend to each other. Depends on sizes alone.

Of each frame the windows stand one after another, largest first: windows of one size attend in one call. Torch only,
no model. Called by fused_vision.py. Shapes: M merged tokens, U patches of one of them, P = M * U patches, F frequencies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch

_MAX_FRAMES = 16  # chosen: sizes that are remembered; one of 1024 patches takes 0.3 MB with 32 frequencies


@dataclass(frozen=True, slots=True)
class Run:
    """Patches [begin, end), which are num_sequences sequences of one length; each attends within itself."""

    begin: int
    end: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """order_P, order_M: what stands where, of the order given. turns_PF: rotary turns, complex64."""

    order_P: torch.Tensor
    order_M: torch.Tensor
    turns_PF: torch.Tensor
    windows: list[Run]
    frames: list[Run]


class VisionLayouts:
    """merge_size: patches, a side of a merged token. window_size: merged tokens, a side of a window. frequency_Q: Q = F / 2,
    which turn by height, and again by width."""

    def __init__(self, merge_size: int, window_size: int, frequency_Q: torch.Tensor) -> None:
        self._merge_size = merge_size
        self._window_size = window_size
        self._frequency_Q = frequency_Q
        self._frame = lru_cache(_MAX_FRAMES)(self._lay_out_frame)

    def lay_out(self, grids: Seq[tuple[int, int, int]]) -> VisionLayout:
        """grids: of each picture frames, height and width, in patches. Each frame is by itself."""
        frames = [self._frame(height, width) for num_frames, height, width in grids for _ in range(num_frames)]
        if len(frames) == 1:
            return frames[0]
        ends = itertools.accumulate(len(frame.order_M) for frame in frames)
        placed = [(end - len(frame.order_M), frame) for end, frame in zip(ends, frames, strict=True)]
        num_unit = self._merge_size**2
        return VisionLayout(
            order_P=torch.cat([frame.order_P + first * num_unit for first, frame in placed]),
            order_M=torch.cat([frame.order_M + first for first, frame in placed]),
            turns_PF=torch.cat([frame.turns_PF for frame in frames]),
            windows=_runs((run.end - run.begin, run.num_sequences) for frame in frames for run in frame.windows),
            frames=_runs((run.end - run.begin, run.num_sequences) for frame in frames for run in frame.frames),
        )

    def _lay_out_frame(self, height: int, width: int) -> VisionLayout:
        device, merge, window = self._frequency_Q.device, self._merge_size, self._window_size
        row_M, column_M = torch.cartesian_prod(torch.arange(height // merge), torch.arange(width // merge)).unbind(1)
        window_M = row_M // window * (width // merge) + column_M // window
        num_tokens = torch.bincount(window_M)  # of each window
        size_M = num_tokens[window_M]
        order_M = torch.argsort(window_M - size_M * len(num_tokens), stable=True)
        row_U, column_U = torch.cartesian_prod(torch.arange(merge), torch.arange(merge)).unbind(1)
        row_P = (row_M[order_M, None] * merge + row_U).flatten().to(device)
        column_P = (column_M[order_M, None] * merge + column_U).flatten().to(device)
        angles_PF = torch.cat((torch.outer(row_P, self._frequency_Q), torch.outer(column_P, self._frequency_Q)), dim=1)
        num_unit = merge**2
        sizes, counts = torch.unique_consecutive(size_M[order_M], return_counts=True)
        windows = zip((counts * num_unit).tolist(), (counts // sizes).tolist(), strict=True)
        return VisionLayout(
            order_P=(order_M[:, None] * num_unit + torch.arange(num_unit)).flatten().to(device),
            order_M=order_M.to(device),
            turns_PF=torch.polar(torch.ones_like(angles_PF), angles_PF),
            windows=_runs(windows),
            frames=_runs([(height * width, 1)]),
        )


def _runs(parts: Iterable[tuple[int, int]]) -> list[Run]:
    """From numbers of patches and of sequences; neighbours of one length are one."""
    runs: list[Run] = []
    for num_patches, num_sequences in parts:
        begin, last = (runs[-1].end, runs[-1]) if runs else (0, None)
        if last is not None and (last.end - last.begin) * num_sequences == num_patches * last.num_sequences:
            runs[-1] = Run(last.begin, last.end + num_patches, last.num_sequences + num_sequences)
        else:
            runs.append(Run(begin, begin + num_patches, num_sequences))
    return runs
