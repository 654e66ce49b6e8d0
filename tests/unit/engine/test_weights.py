"""Products with dense and packed weights against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from triptych.shared.engine.weights import DenseWeight, PackedWeight, make_weight

NUM_INPUTS, NUM_OUTPUTS = 48, 96
KINDS = pytest.mark.parametrize("kind", [DenseWeight, PackedWeight])


@KINDS
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(kind: type[DenseWeight] | type[PackedWeight], num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, rows, before = (
        torch.randn(NUM_OUTPUTS, NUM_INPUTS),
        torch.randn(num_rows, NUM_INPUTS),
        torch.randn(num_rows, NUM_OUTPUTS),
    )
    bias = torch.randn(NUM_OUTPUTS) if has_bias else None
    expected = linear(rows, weight, bias)
    made, added = kind(weight, bias), before.clone()
    torch.testing.assert_close(made.product(rows), expected)
    made.add_product(rows, added)
    torch.testing.assert_close(added, before + expected)


@KINDS
def test_rows_of_something_wider(kind: type[DenseWeight] | type[PackedWeight]) -> None:
    """Hidden states are, and so are those that are added to."""
    torch.manual_seed(0)
    weight, wide = torch.randn(NUM_OUTPUTS, NUM_INPUTS), torch.randn(7, NUM_INPUTS + 16)
    states = torch.zeros(7, NUM_OUTPUTS + 16)
    kind(weight).add_product(wide[:, :NUM_INPUTS], states[:, :NUM_OUTPUTS])
    torch.testing.assert_close(states[:, :NUM_OUTPUTS], linear(wide[:, :NUM_INPUTS], weight))
    assert not states[:, NUM_OUTPUTS:].any()


def test_large_float32_weights_are_packed() -> None:
    assert isinstance(make_weight(torch.zeros(512, 512)), PackedWeight)
    assert isinstance(make_weight(torch.zeros(64, 64)), DenseWeight)
    assert isinstance(make_weight(torch.zeros(512, 512, dtype=torch.bfloat16)), DenseWeight)
