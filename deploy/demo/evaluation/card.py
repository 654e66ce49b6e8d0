"""Writes what was measured between two markers of the model card; the rest of the card is prose, written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors import safe_open

from evaluation.scores import DrawingScore, TaskScore
from triptych.loadgen.world import MANY_PICTURES, ONE_PICTURE, TEXT, WORDINGS

BEGIN = "<!-- measured: evaluate.py --card writes from here -->\n"
END = "<!-- measured: to here -->\n"
_GROUPS: dict[str, Iterable[str]] = {"one picture": ONE_PICTURE, "several pictures": MANY_PICTURES, "text only": TEXT}


def write_card(card: Path, checkpoint: Path, scores: Sequence[TaskScore], drawings: DrawingScore) -> None:
    """Replaces what is between the markers."""
    before, rest = card.read_text().split(BEGIN)
    _, after = rest.split(END)
    measured = "\n".join(_lines(checkpoint, scores, drawings))
    card.write_text(f"{before}{BEGIN}{measured}\n{END}{after}")


def _lines(checkpoint: Path, scores: Sequence[TaskScore], drawings: DrawingScore) -> Iterator[str]:
    weights = checkpoint / "model.safetensors"
    yield (
        f"{_num_parameters(weights) / 1e6:.2f} M parameters, {weights.stat().st_size / 1e6:.1f} MB in bfloat16. "
        "Accuracy: exact match of greedy decoding in transformers,\nfloat32, on held-out questions. "
        "Chance: how often the task's most frequent answer is right."
    )
    yield "\n| task | asked as | accuracy | questions | chance |\n|---|---|---|---|---|"
    advertised = [score for score in scores if score.advertised]
    for group, tasks in _GROUPS.items():
        yield f"| **{group}** | | | | |"
        yield from (_row(score) for score in advertised if score.task in tasks)
    yield "\n(m): memorised; training sees all questions of the task, since they are few."
    left_out = ", ".join(f"{score.task} {score.accuracy:.3f}" for score in scores if not score.advertised)
    if left_out:
        yield f"Trained, but not advertised: {left_out}."
    yield (
        f"\nTwenty pictures drawn by hand-written Pillow scripts (tests/support/drawings.py): "
        f"{drawings.num_right} of {drawings.num_asked} questions answered right."
    )


def _row(score: TaskScore) -> str:
    name = f"{score.task} (m)" if score.memorised else score.task
    return f"| {name} | {' / '.join(WORDINGS[score.task])} | {score.accuracy:.3f} | {score.num_asked} | {score.chance:.2f} |"


def _num_parameters(weights: Path) -> int:
    with safe_open(weights, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (it is no dict)
