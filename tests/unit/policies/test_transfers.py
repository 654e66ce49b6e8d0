"""What transfers cost, by cost models."""

from __future__ import annotations

import pytest

from triptych.shared.cost_model.published import published_cost_model
from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.policies.routing import EMBEDDING_COSTS, KV_COSTS
from triptych.shared.policies.transfers import transfers_of

LINK = LinkCosts(0.004, 1e9)


@pytest.mark.parametrize("time_scale", [1.0, 4.0])
def test_bytes_take_modelled_time_and_messages_real_one(time_scale: float) -> None:
    model = published_cost_model("a100", "qwen2.5-vl-7b", 1)
    found = transfers_of(model, LINK, time_scale)
    assert found.kv.transfer_s(0) == pytest.approx(KV_COSTS.fixed_s + 0.004 / time_scale)
    assert found.kv.token_s == pytest.approx(57_344 / 1e9 / time_scale)
    assert found.embeddings.transfer_s(0) == pytest.approx(EMBEDDING_COSTS.fixed_s + 0.004 / time_scale)
    assert found.embeddings.token_s == pytest.approx(7_168 / 1e9 / time_scale)


def test_what_is_chosen_without_a_model_is_about_one_tcp_connection() -> None:
    """Of the model and the link that it says it is for."""
    found = transfers_of(published_cost_model("a100", "qwen2.5-vl-7b", 1), LinkCosts(0.0, 1e9))
    for chosen, costs in ((KV_COSTS, found.kv), (EMBEDDING_COSTS, found.embeddings)):
        assert chosen.transfer_s(1000) == pytest.approx(costs.transfer_s(1000), rel=0.1)


def test_a_picture_that_is_only_attended_to_has_more_embeddings_than_places() -> None:
    """Llama-3.2-11B: 6404 image tokens of 8 KB in 1601 places."""
    found = transfers_of(published_cost_model("a100", "llama-3.2-11b", 1), LinkCosts(0.0, 1e9))
    assert found.embeddings.token_s * 1601 == pytest.approx(6404 * 8192 / 1e9)
