"""Measures a checkpoint of the demo's world on held-out questions, in plain transformers.

    python deploy/demo/evaluate.py deploy/demo/checkpoint

Ends with status 1 when something advertised is right less often than it has to be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH

import torch
from evaluation.answering import Answerer
from evaluation.card import write_card
from evaluation.scores import MIN_ACCURACY, DrawingScore, TaskScore, score_drawings, score_task

from triptych.loadgen.world import TASKS

CARD = Path(__file__).parent / "README.md"
MIN_CARD_QUESTIONS = 200  # of each task


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.checkpoint)
    scores = [] if arguments.drawings else _score_tasks(answerer, arguments)
    drawings = _score_drawings(answerer) if arguments.drawings or arguments.card else None
    if arguments.json:
        arguments.json.write_text(json.dumps(_json(arguments.seed, scores, drawings), indent=2) + "\n")
    too_low = [f"{score.task} {score.accuracy:.3f}" for score in scores if score.wrongly_advertised]
    if drawings and drawings.accuracy < MIN_ACCURACY:
        too_low.append(f"drawings {drawings.accuracy:.3f}")
    if too_low:
        unchanged = "; the card is unchanged" if arguments.card else ""
        print(f"advertised, but under {MIN_ACCURACY:.2f}: {', '.join(too_low)}{unchanged}")
        return 1
    if arguments.card and drawings:
        write_card(CARD, arguments.checkpoint, scores, drawings)
        print(f"wrote {CARD}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="DIR")
    parser.add_argument(
        "--questions", type=int, default=200, metavar="N", choices=range(1, 1001), help="of each task; default: 200"
    )
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other questions")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=f"of: {', '.join(TASKS)}")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of the CPU; default: 1, since more help little and wait for each other on a busy machine",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--drawings", action="store_true", help="ask about the tests' hand-drawn pictures instead")
    what.add_argument("--card", action="store_true", help="write the numbers, drawings too, into the model card")
    arguments = parser.parse_args()
    if not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"{arguments.checkpoint} holds no checkpoint")
    if arguments.card and (arguments.questions < MIN_CARD_QUESTIONS or set(arguments.tasks) != set(TASKS)):
        parser.error(f"--card wants all tasks and at least {MIN_CARD_QUESTIONS} questions of each")
    return arguments


def _score_tasks(answerer: Answerer, arguments: argparse.Namespace) -> list[TaskScore]:
    scores = []
    began_s = time.monotonic()
    for number, task in enumerate(arguments.tasks, 1):
        score = score_task(answerer, task, arguments.questions, arguments.seed)
        scores.append(score)
        marks = ", memorised" * score.memorised + ", not advertised" * (not score.advertised)
        told = f"{score.accuracy:.3f} of {score.num_asked}, chance {score.chance:.2f}{marks}"
        print(f"{number:2}/{len(arguments.tasks)} {time.monotonic() - began_s:4.0f} s  {task:12} {told}", flush=True)
    return scores


def _score_drawings(answerer: Answerer) -> DrawingScore:
    drawings = score_drawings(answerer)
    print(f"drawings: {drawings.num_right} of {drawings.num_asked} right ({drawings.accuracy:.3f})")
    for names, question, said in drawings.misses:
        print(f"  {', '.join(names)}: {question.text} ({question.task})  {said!r}, not {question.answer!r}")
    return drawings


def _json(seed: int, scores: list[TaskScore], drawings: DrawingScore | None) -> dict[str, Any]:
    told: dict[str, Any] = {"seed": seed, "tasks": [{**asdict(score), "accuracy": score.accuracy} for score in scores]}
    if drawings:
        told["drawings"] = {"num_right": drawings.num_right, "num_asked": drawings.num_asked}
    return told


if __name__ == "__main__":
    sys.exit(main())
