"""The training loop: phase after phase, step after step, with a saved state to go on from and a line of progress.

The same recipe, seed and thread count give the same weights, whether training was interrupted or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.batches import Batch, Source, stream
from training.forward import forward, see
from training.losses import Score, answer_loss, cell_loss, score, whereabouts_loss
from training.model import make_model, num_parameters, save_checkpoint
from training.optimizer import Optimizer
from training.pictures import CELL_LABELS, image_options
from training.progress import Meter, score_line
from training.recipe import Mix, Phase, Recipe
from training.rows import RowWriter
from training.state import Progress, load_state, save_state
from training.tokenizer import train_tokenizer
from triptych.loadgen.world import corpus

_MAX_PICTURES = 4  # that the number head tells apart
_CELL_WEIGHT, _WHEREABOUTS_WEIGHT = 0.3, 0.1  # beside the loss on answers; chosen
_MAX_GRADIENT_NORM = 1.0
HELD_OUT_MIX = Mix({"one": 8, "many": 8, "text": 4})


@dataclass(frozen=True, slots=True)
class Setup:
    """How to run, none of which changes what is trained."""

    out_dir: Path
    device: torch.device
    num_workers: int
    save_every: int
    report_every: int
    num_held_out_batches: int
    report: Callable[[str], None]


class Trainer:
    """Trains `recipe` with `seed` in setup.out_dir; goes on from the state that is there."""

    def __init__(self, recipe: Recipe, seed: int, setup: Setup) -> None:
        self._recipe, self._seed, self._setup = recipe, seed, setup
        setup.out_dir.mkdir(parents=True, exist_ok=True)
        self.tokenizer = _tokenizer(setup.out_dir / "tokenizer.json", recipe.model.vocab_size)
        self.model = make_model(recipe.model, self.tokenizer, seed).to(setup.device)
        self._heads = _make_heads(recipe.model.hidden_size, seed).to(setup.device)
        self._parameters = dict(self.model.named_parameters())
        self._parameters |= {f"heads.{name}": parameter for name, parameter in self._heads.named_parameters()}
        self._writer = RowWriter(self.tokenizer, image_options(recipe.model))
        self._state_path = setup.out_dir / "state.safetensors"

    def run(self) -> None:
        """Train what is left of the recipe, then write the checkpoint."""
        self._setup.report(f"{num_parameters(self.model) / 1e6:.2f} M parameters, on {self._setup.device}")
        progress, optimizer_state = self._resume()
        phases = list(self._recipe.phases)
        for name in phases[phases.index(progress.phase) :]:
            optimizer = Optimizer(self._parameters, self._recipe.phases[name].rates)
            optimizer.load_state(optimizer_state if name == progress.phase else {})
            self._run_phase(name, progress.step if name == progress.phase else 0, optimizer)
        save_checkpoint(self.model, self._recipe.model, self.tokenizer, self._setup.out_dir / "checkpoint")
        if self._setup.num_held_out_batches:
            self._setup.report("held out: " + score_line(self._held_out()))

    @torch.no_grad()
    def _held_out(self) -> Score:
        """By the training forward; evaluate.py asks as a client does."""
        source = Source(self._writer, HELD_OUT_MIX, (self._seed,), held_out=True)
        total: Score | None = None
        for batch in stream(source, range(self._setup.num_held_out_batches), self._setup.num_workers):
            on_device = batch.on(self._setup.device)
            counts = score(forward(self.model, on_device).answer_logits, on_device)
            total = counts if total is None else Score(total.right + counts.right, total.asked + counts.asked)
        assert total is not None
        return total

    def _run_phase(self, name: str, first_step: int, optimizer: Optimizer) -> None:
        phase, setup = self._recipe.phases[name], self._setup
        meter = Meter(name, first_step, phase.num_steps)
        source = Source(self._writer, phase.mix, (self._seed, list(self._recipe.phases).index(name)))
        steps = range(first_step, phase.num_steps)
        for step, batch in zip(steps, stream(source, steps, setup.num_workers), strict=True):
            self._step(phase, step, batch.on(setup.device), optimizer, meter)
            done = step + 1
            if done % setup.report_every == 0 or done == phase.num_steps:
                setup.report(meter.line(done))
            if done % setup.save_every == 0 or done == phase.num_steps:
                self._save(name, done, optimizer)

    def _step(self, phase: Phase, step: int, batch: Batch[Tensor], optimizer: Optimizer, meter: Meter) -> None:
        if len(batch.tasks):
            outputs = forward(self.model, batch)
            cells, answers = outputs.cells, answer_loss(outputs.answer_logits, batch)
            whereabouts = whereabouts_loss(self._heads["number"](outputs.early), self._heads["place"](outputs.early), batch)
            labels, accuracies = cell_loss(self._heads["cells"](cells), batch)
            weight = phase.cell_weight_at(step)
            loss = answers + weight * (_CELL_WEIGHT * labels + _WHEREABOUTS_WEIGHT * whereabouts)
            meter.add(answers.detach(), accuracies, score(outputs.answer_logits.detach(), batch))
        else:
            loss, accuracies = cell_loss(self._heads["cells"](see(self.model.model.visual, batch)), batch)
            meter.add(loss.detach(), accuracies, None)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_GRADIENT_NORM)
        optimizer.step(phase.rate_scale(step))

    def _save(self, phase: str, step: int, optimizer: Optimizer) -> None:
        tensors: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in self._parameters.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer.state().items()}
        save_state(self._state_path, Progress(self._recipe_json, self._seed, phase, step), tensors)

    def _resume(self) -> tuple[Progress, dict[str, Tensor]]:
        """Where to go on, with the weights loaded, and the optimizer's tensors."""
        if not self._state_path.exists():
            return Progress(self._recipe_json, self._seed, next(iter(self._recipe.phases)), 0), {}
        progress, tensors = load_state(self._state_path)
        if (progress.recipe, progress.seed) != (self._recipe_json, self._seed):
            raise StateMismatch(f"{self._state_path} is of another recipe or seed: go on with those, or use another folder")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"weights/{name}"])
        self._setup.report(f"going on after step {progress.step} of phase {progress.phase!r}")
        prefix = "optimizer/"
        return progress, {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    @property
    def _recipe_json(self) -> str:
        return json.dumps(asdict(self._recipe))


class StateMismatch(Exception):
    """The folder holds training of something else."""


def _make_heads(hidden_size: int, seed: int) -> nn.ModuleDict:
    """Used in training only: what a cell shows, from the vision tower; and which picture it is of, from the text model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"cells": sum(CELL_LABELS.values()), "number": _MAX_PICTURES, "place": CELL_LABELS["place"]}
        return nn.ModuleDict({name: nn.Linear(hidden_size, size) for name, size in sizes.items()})


def _tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The one of an earlier run in the folder, else a new one."""
    if not path.exists():
        train_tokenizer(corpus(1000), vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))
