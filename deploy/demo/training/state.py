"""What training needs to go on where it stopped: one safetensors file, replaced as a whole, described in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """recipe: as JSON; step: steps done in `phase`, the phases before it are done."""

    recipe: str
    seed: int
    phase: str
    step: int


def save_state(path: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    partial = path.with_suffix(".partial")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial, {"progress": json.dumps(asdict(progress))})
    partial.replace(path)


def load_state(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        progress = Progress(**json.loads(file.metadata()["progress"]))
    return progress, load_file(path)
