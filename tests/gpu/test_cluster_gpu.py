"""The whole cluster with its engines on a CUDA device: tokens are those of transformers' `generate` on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.cases import random_case
from support.cluster import Cluster
from support.parity import check_parity
from support.reference import Reference
from support.watch import Watch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_CASES = 60


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["auto", "gloo"])
async def test_a_cluster_on_the_device_equals_transformers(tiny_checkpoint: Path, tmp_path: Path, transport: str) -> None:
    reference = Reference(tiny_checkpoint, tmp_path)
    cluster = Cluster(tiny_checkpoint, tmp_path / "run", env={"TRIPTYCH_DEVICE": "cuda", "TRIPTYCH_TRANSPORT": transport})
    try:
        async with Watch(cluster.nats_url) as watch:
            await watch.until_complete()
            answers = await check_parity(cluster.url, [random_case(seed) for seed in range(NUM_CASES)], reference)
            await watch.until_at_rest(5, "after the run on the device")
        seconds = sorted(answer.seconds for answer in answers)
        figures = {"transport": transport, "ready_s": cluster.info["ready_s"], "e2e_p50_s": seconds[len(seconds) // 2]}
        print(json.dumps(figures))
    finally:
        cluster.stop()
