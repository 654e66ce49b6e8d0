"""Training runs of a few steps: interrupted ones end in the same weights, other ones are refused, and all of them learn."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import train
from tokenizers import Tokenizer
from training.recipe import STANDARD, Recipe
from training.tokenizer import train_tokenizer
from training.trainer import Setup, Trainer

from triptych.loadgen.world import corpus

MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vision_hidden_size": 64,
    "vision_intermediate_size": 64,
    "vision_depth": 2,
}
ROWS = {
    name: {"cells": 3} if "cells" in phase.mix.num_rows else {"one": 1, "many": 1, "text": 1}
    for name, phase in STANDARD.phases.items()
}
CHANGES = {"model": MODEL, "phases": {name: {"num_steps": 4, "mix": {"num_rows": rows}} for name, rows in ROWS.items()}}
RECIPE = STANDARD.changed(CHANGES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(20), MODEL["vocab_size"])


@pytest.fixture(scope="module")
def new_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes folders that have their tokenizer already: its training takes longer than these runs."""
    torch.set_num_threads(1)

    def make() -> Path:
        folder = tmp_path_factory.mktemp("run")
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture(scope="module")
def whole(new_folder: Callable[[], Path]) -> Path:
    """The folder of a run that was not interrupted."""
    folder = new_folder()
    _run(RECIPE, folder)
    return folder


def _setup(folder: Path, report: Callable[[str], None] = lambda line: None) -> Setup:
    return Setup(
        out_dir=folder,
        device=torch.device("cpu"),
        num_workers=0,
        save_every=2,
        report_every=1,
        num_held_out_batches=0,
        report=report,
    )


def _run(recipe: Recipe, folder: Path, seed: int = 0) -> list[str]:
    """The lines of progress."""
    lines: list[str] = []
    Trainer(recipe, seed, _setup(folder, lines.append)).run()
    return lines


def _weights(folder: Path) -> bytes:
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


class Stopped(Exception):
    """Stands for a Ctrl-C."""


# between two saves, right after one, and in the last phase
@pytest.mark.parametrize(("phase", "step"), [(0, 3), (1, 2), (-1, 1)])
def test_an_interrupted_run_ends_in_the_same_weights(
    phase: int, step: int, whole: Path, new_folder: Callable[[], Path]
) -> None:
    interrupted = new_folder()

    def stop(line: str) -> None:
        if line.startswith(f"{list(RECIPE.phases)[phase]} {step}/"):
            raise Stopped

    with pytest.raises(Stopped):
        Trainer(RECIPE, 0, _setup(interrupted, stop)).run()
    assert not (interrupted / "checkpoint").exists()
    lines = _run(RECIPE, interrupted)
    assert any(line.startswith("going on after step") for line in lines), lines
    assert _weights(interrupted) == _weights(whole)
    assert (interrupted / "state.safetensors").read_bytes() == (whole / "state.safetensors").read_bytes()


def test_another_seed_gives_other_weights(whole: Path, new_folder: Callable[[], Path]) -> None:
    other = new_folder()
    _run(RECIPE, other, seed=1)
    assert _weights(other) != _weights(whole)


@pytest.mark.parametrize("difference", [["--seed", "1"], ["--recipe", "other.json"]])
def test_a_folder_of_another_run_is_refused_in_one_line(
    difference: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (whole / "state.safetensors").read_bytes()
    monkeypatch.chdir(tmp_path)
    Path("same.json").write_text(json.dumps(CHANGES))
    Path("other.json").write_text(json.dumps(CHANGES | {"phases": CHANGES["phases"] | {"see": {"num_steps": 5}}}))
    options = ["--out", str(whole), "--threads", "1", "--device", "cpu", "--recipe", "same.json", *difference]
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    with pytest.raises(SystemExit) as refused:
        train.main()
    assert re.fullmatch(r".*state\.safetensors is of another recipe or seed: .*", str(refused.value))
    assert (whole / "state.safetensors").read_bytes() == before


def test_the_tokenizer_is_the_same_each_time() -> None:
    """What it is trained on, too."""
    trained = {train_tokenizer(corpus(100), 700).to_str() for _ in range(3)}
    assert len(trained) == 1


@pytest.mark.parametrize("phase", list(STANDARD.phases))
def test_a_few_steps_lower_the_loss(phase: str, new_folder: Callable[[], Path]) -> None:
    only = dataclasses.replace(RECIPE.phases[phase], num_steps=24, num_rising_steps=4)
    lines = _run(dataclasses.replace(RECIPE, phases={phase: only}), new_folder())
    losses = [float(match[1]) for line in lines if (match := re.search(r"loss ([\d.]+)", line))]
    assert len(losses) == 24
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6]), losses
