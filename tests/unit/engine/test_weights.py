"""Products with dense and packed weights against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from triptych.shared.engine.weights import DenseWeight, MakeWeight, PackedWeight, dense_weight, weight_for_few_rows

NUM_INPUTS, NUM_OUTPUTS, PART = 48, 96, 16


@pytest.fixture(params=[dense_weight, PackedWeight], ids=["dense", "packed"])
def make(request: pytest.FixtureRequest) -> MakeWeight:
    made: MakeWeight = request.param
    return made


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(make: MakeWeight, num_rows: int, has_bias: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    torch.manual_seed(0)
    weight, rows, before = (
        torch.randn(NUM_OUTPUTS, NUM_INPUTS),
        torch.randn(num_rows, NUM_INPUTS),
        torch.randn(num_rows, NUM_OUTPUTS),
    )
    bias = torch.randn(NUM_OUTPUTS) if has_bias else None
    expected = linear(rows, weight, bias)
    made = make(weight, PART, bias)
    torch.testing.assert_close(_joined(made.product(rows)), expected)
    out = made.empty(num_rows)
    assert made.product(rows, out) is out
    torch.testing.assert_close(_joined(out), expected)
    first, second = made.split(PART)
    torch.testing.assert_close(_joined(first.product(rows)), expected[:, :PART])
    torch.testing.assert_close(_joined(second.product(rows)), expected[:, PART:])
    whole, added = make(weight, NUM_OUTPUTS, bias), before.clone()
    whole.add_product(rows, added)
    torch.testing.assert_close(added, before + expected)


def test_rows_of_something_wider(make: MakeWeight) -> None:
    """Hidden states are, and so are those that are added to."""
    torch.manual_seed(0)
    weight, wide = torch.randn(NUM_OUTPUTS, NUM_INPUTS), torch.randn(7, NUM_INPUTS + 16)
    states = torch.zeros(7, NUM_OUTPUTS + 16)
    make(weight, NUM_OUTPUTS, None).add_product(wide[:, :NUM_INPUTS], states[:, :NUM_OUTPUTS])
    torch.testing.assert_close(states[:, :NUM_OUTPUTS], linear(wide[:, :NUM_INPUTS], weight))
    assert not states[:, NUM_OUTPUTS:].any()


def test_large_float32_weights_are_packed() -> None:
    assert isinstance(weight_for_few_rows(torch.zeros(512, 512), 512), PackedWeight)
    assert isinstance(weight_for_few_rows(torch.zeros(64, 64), 64), DenseWeight)
    assert isinstance(weight_for_few_rows(torch.zeros(512, 512, dtype=torch.bfloat16), 512), DenseWeight)


def _joined(parts_PTW: torch.Tensor) -> torch.Tensor:
    """[T, O]."""
    return parts_PTW.transpose(0, 1).flatten(1)
