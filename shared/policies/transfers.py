"""What it takes to bring KV and embeddings from one instance to another, by a cost model: of emulated GPUs, or a profile's.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.policies.routing import EMBEDDING_COSTS, KV_COSTS, TransferCosts


@dataclass(frozen=True, slots=True)
class Transfers:
    """kv: of prompts. embeddings: by the places in a prompt that pictures take."""

    kv: TransferCosts = KV_COSTS
    embeddings: TransferCosts = EMBEDDING_COSTS


def transfers_of(model: CostModel, link: LinkCosts, time_scale: float = 1.0) -> Transfers:
    """Between instances with these costs and this link. The messages around a transfer are real, whatever the instances are.

    Args:
        time_scale: modelled seconds of the model and the link per second.
    """
    memory = model.memory
    tokens_per_place = 1.0
    if model.architecture == "CroAttn":  # whose pictures are counted by the KV that they take (shared/emulation.py)
        tokens_per_place = memory.kv_bytes_per_token / memory.kv_bytes_per_image_token

    def costs(messages_s: float, num_bytes: float) -> TransferCosts:
        return TransferCosts(messages_s + link.latency_s / time_scale, num_bytes / link.bytes_per_s / time_scale)

    return Transfers(
        kv=costs(KV_COSTS.fixed_s, memory.kv_bytes_per_token),
        embeddings=costs(EMBEDDING_COSTS.fixed_s, memory.embedding_bytes_per_token * tokens_per_place),
    )
