"""Which checkpoint a benchmark runs: a folder, or one of the kinds that loadgen makes, made when it is first needed."""

from __future__ import annotations

from pathlib import Path

from triptych.loadgen.bench.runner import BenchFailed, tell
from triptych.loadgen.checkpoint import KINDS, make_checkpoint

DEMO_CHECKPOINT = Path("deploy/demo/checkpoint")
MADE = Path("build/checkpoints")


def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint.

    Raises:
        BenchFailed: `model` is neither a folder with a checkpoint nor a kind that can be made.
    """
    if (Path(model) / "config.json").is_file():
        return Path(model)
    kind = next((known for known in KINDS if known == model), None)
    if kind is None:
        raise BenchFailed(f"{model!r} is no checkpoint's folder, and not one of {', '.join(KINDS)}")
    folder = MADE / kind
    if not (folder / "generation_config.json").is_file():  # written last
        tell(f"making the checkpoint {folder} ...")
        make_checkpoint(kind, folder)
    return folder
