"""What no publication says, or says of one machine only: named settings with the value chosen, all in this one place.

Change them by `dataclasses.replace(Unknowns(), ...)`; a result that hangs on one of them should be shown over a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from triptych.shared.cost_model.forms import NotNegative

Link = Literal["rdma", "tcp", "local"]
Stage = Literal["encode", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """One pull alone on the link: latency_s, agreeing on sizes included, then bytes_per_s."""

    latency_s: NotNegative
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds for one tensor."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Unknowns:
    """Defaults are chosen; where something public speaks for a value, it is named."""

    # transfer: with these an 896^2 image of Llama-3.2-11B takes 2.6 ms and 54 ms, one of several images more; ModServe
    # (arXiv 2502.00937) has a P99 of 5 ms over InfiniBand, and a P50 and P99 of 100 and 180 ms over TCP
    rdma: LinkCosts = LinkCosts(0.0005, 25e9)  # 200 Gb/s InfiniBand
    tcp: LinkCosts = LinkCosts(0.001, 1e9)  # one connection of one core
    local: LinkCosts = LinkCosts(0.0002, 10e9)  # shared memory of one host

    # start-up and roles
    process_start_s: float = 20.0  # interpreter, imports, CUDA context, warm-up
    weights_bytes_per_s: float = 2e9  # from a local disk to each GPU
    role_switch_s: float = 0.5  # until every router has seen it: one heartbeat

    # two stages at the same time on one instance: factor on the time of the first
    compute_beside_compute: float = 2.0  # encode and prefill both fill the GPU: no gain in sharing it
    compute_beside_decode: float = 1.2
    decode_beside_compute: float = 1.5

    # published GPU classes (published.py)
    vit_mfu: float = 0.4  # vision towers reach 0.35 to 0.5 of the peak
    step_overhead_s: float = 0.003  # scheduling, launching and sampling of one language step
    encode_overhead_s: float = 0.003  # the same of one encode batch
    encode_serial_share: float = 0.1  # of encoding that TP does not divide; ElasticMM's code scales it by n ** 0.8
    memory_utilization: float = 0.9  # of the GPU's memory; vLLM's default
    preprocess_cores: int = 12  # CPU cores per GPU: Azure's ND A100 v4 has 96 for 8

    def slowdown(self, stage: Stage, beside: Sequence[Stage]) -> float:
        """Factor on the time of `stage` while the stages of `beside` run on the same instance; 1.0 alone."""
        factor = 1.0
        for other in beside:
            if stage == "decode":
                factor *= 1.0 if other == "decode" else self.decode_beside_compute
            else:
                factor *= self.compute_beside_decode if other == "decode" else self.compute_beside_compute
        return factor

    def startup_s(self, weight_bytes_per_gpu: float) -> float:
        """From the decision to start an instance until it takes work."""
        return self.process_start_s + weight_bytes_per_gpu / self.weights_bytes_per_s

    def transfer_s(self, num_bytes: int, link: Link) -> float:
        """One pull, alone on its link."""
        costs: LinkCosts = {"rdma": self.rdma, "tcp": self.tcp, "local": self.local}[link]
        return costs.transfer_s(num_bytes)
