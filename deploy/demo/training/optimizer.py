"""Muon for the hidden matrices, AdamW for everything else.

torch.optim.Muon works in bfloat16, which slows a CPU without such units down, and one matrix at a time: here matrices of one
shape are orthogonalized together, in float32. AdamW alone never left the plateau on which a vision tower starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

MOMENTUM = 0.95  # Muon's usual one
WEIGHT_DECAY = 0.02  # chosen, as are the betas
ADAMW_BETAS = (0.9, 0.98)
# Five steps of an odd polynomial that takes all singular values near 1 (coefficients: modded-nanogpt's)
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@dataclass(frozen=True, slots=True)
class LearningRates:
    """muon_vision, muon_text: of the hidden matrices; adamw: of embeddings, head, norms and biases."""

    muon_vision: float
    muon_text: float
    adamw: float


class Optimizer:
    """Owns no parameters; its state is a dict of named tensors, so that training can stop and go on."""

    def __init__(self, parameters: Mapping[str, Parameter], rates: LearningRates) -> None:
        self._rates = rates
        self._matrices = {name: p for name, p in parameters.items() if is_hidden_matrix(name, p)}
        self._momentum = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        self._others = {name: p for name, p in parameters.items() if name not in self._matrices}
        decayed = [p for p in self._others.values() if p.ndim >= 2]
        kept = [p for p in self._others.values() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, rates.adamw, betas=ADAMW_BETAS, fused=True)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at `scale` times the rates. Parameters without a gradient stay; all gradients are cleared."""
        for group in self._adamw.param_groups:
            group["lr"] = self._rates.adamw * scale
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        alike: dict[tuple[torch.Size, float], list[str]] = defaultdict(list)
        for name, parameter in self._matrices.items():
            if parameter.grad is not None:
                alike[parameter.shape, self._rates.muon_vision if "visual" in name else self._rates.muon_text].append(name)
        for (_, rate), names in alike.items():
            self._step_matrices(names, rate * scale)

    def _step_matrices(self, names: list[str], rate: float) -> None:
        matrices: list[Tensor] = [self._matrices[name] for name in names]
        momentum = [self._momentum[name] for name in names]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(momentum, gradients, 1 - MOMENTUM)
        update = orthogonalized(torch.lerp(torch.stack(gradients), torch.stack(momentum), MOMENTUM))
        num_rows, num_columns = matrices[0].shape
        torch._foreach_mul_(matrices, 1 - rate * WEIGHT_DECAY)
        torch._foreach_add_(matrices, list(update), alpha=-rate * max(1.0, num_rows / num_columns) ** 0.5)
        for matrix in matrices:
            matrix.grad = None

    def state(self) -> dict[str, Tensor]:
        tensors = {f"momentum/{name}": buffer for name, buffer in self._momentum.items()}
        for name, parameter in self._others.items():
            tensors |= {f"adamw/{name}/{key}": value for key, value in self._adamw.state[parameter].items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            kind, name, *rest = key.split("/")
            if kind == "momentum":
                self._momentum[name].copy_(tensor)
            elif kind == "adamw":
                parameter = self._others[name]
                self._adamw.state[parameter][rest[0]] = tensor.to(parameter.device, copy=True)


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Embeddings, the output head and the heads used in training only are no maps between hidden states."""
    return parameter.ndim == 2 and name.startswith("model.") and "embed_tokens" not in name


def orthogonalized(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly; [count, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x
