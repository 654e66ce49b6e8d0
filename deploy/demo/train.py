"""Trains the demo checkpoint from nothing, in one command; started again, it goes on where it stopped.

    python deploy/demo/train.py --out build/demo-training

leaves the checkpoint in build/demo-training/checkpoint. A CUDA device is used when there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are forked
os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # threads that spin for long turn a little load beside them into a standstill
sys.path.insert(0, str(Path(__file__).parent))  # absent with PYTHONSAFEPATH

import torch
from training.recipe import STANDARD
from training.trainer import Setup, StateMismatch, Trainer

from triptych.shared.machine import num_cores

NUM_HELD_OUT_BATCHES = 60  # 20 rows each: a few hundred questions of nearly every task


def main() -> None:
    arguments = _arguments()
    cores = num_cores()
    torch.set_num_threads(arguments.threads or max(1, cores - (cores > 2)))
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    recipe = STANDARD.changed(json.loads(arguments.recipe.read_text())) if arguments.recipe else STANDARD
    workers = arguments.workers or max(1, cores - 4)
    setup = Setup(
        out_dir=arguments.out,
        device=device,
        num_workers=workers,
        save_every=arguments.save_every,
        report_every=arguments.report_every,
        num_held_out_batches=NUM_HELD_OUT_BATCHES,
        report=_report,
    )
    try:
        Trainer(recipe, arguments.seed, setup).run()
    except StateMismatch as mismatch:
        sys.exit(str(mismatch))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state and the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, help="JSON file: what differs from the standard recipe")
    parser.add_argument("--device", help="cpu or cuda; default: cuda if there is one")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; default: all, but for one on a larger machine")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that make batches; default: one, more on a larger machine"
    )
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--report-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
