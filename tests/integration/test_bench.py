"""Each benchmark really runs, with tiny sizes: that it measures and reports, not how fast anything is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triptych.loadgen.cli import main


def quick(name: str, *arguments: str) -> dict[str, Any]:
    ran = CliRunner().invoke(main, ["bench", name, "--quick", "--json", *arguments])
    assert ran.exit_code == 0, ran.output
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert report["bench"] == name
    assert report["conditions"]["quick"] is True
    assert all(figure >= 0 for figure in report["figures"].values()), report["figures"]
    return report


def sides_of(report: dict[str, Any], row: str) -> set[str]:
    return {name.split(".")[1] for name in report["figures"] if name.startswith(f"{row}.")}


def test_transport() -> None:
    assert sides_of(quick("transport"), "gb_per_s_1mb") == {"shared_memory", "memcpy", "gloo", "socket"}


def test_engine(tiny_checkpoint: Path) -> None:
    report = quick("engine", "--model", str(tiny_checkpoint))
    for phase in ("prefill", "decode"):
        assert sides_of(report, f"{phase}_tokens_per_s_prompt16_batch2") == {"triptych", "generate", "forward"}
    assert report["conditions"]["text_parameters"] > 0


@pytest.mark.long
def test_emulated() -> None:
    report = quick("emulated")
    assert sides_of(report, "router_cpu_ms") == {"instances_4", "instances_8"}
    assert report["figures"]["num_lost.instances_8"] == 0


@pytest.mark.long
def test_latency(tiny_checkpoint: Path) -> None:
    report = quick("latency", "--model", str(tiny_checkpoint))
    assert sides_of(report, "picture_ttft_ms") == {"client", "engine_alone"}
    assert sides_of(report, "picture_encoder_ms") == {"queued", "transfer", "compute"}
    assert sides_of(report, "router_cpu_ms") == {"real_stages", "stub_stages"}


@pytest.mark.long
def test_overlap() -> None:
    report = quick("overlap")
    assert sides_of(report, "half_ttft_ms") == {"overlapped", "barrier"}
    assert report["figures"]["half_over_bound.overlapped"] >= 1.0


@pytest.mark.long
def test_policy() -> None:
    report = quick("policy")
    for workload in ("bursts", "image-light"):
        assert sides_of(report, f"{workload}_goodput_own_scaled_per_s") == {"monolith", "triptych"}
        assert sides_of(report, f"{workload}_emulation_lost_share") == {"monolith", "triptych"}
    assert sides_of(report, "bursts_text_p99_ttft_in_bursts_s") == {"monolith", "triptych"}


@pytest.mark.long
def test_policy_on_a_real_engine(tiny_checkpoint: Path) -> None:
    report = quick("policy", "--model", str(tiny_checkpoint))
    assert sides_of(report, "bursts_goodput_own_scaled_per_s") == {"monolith", "triptych"}
    assert not any("emulation_lost_share" in name for name in report["figures"])


@pytest.mark.long
def test_elastic_on_a_real_engine(tiny_checkpoint: Path) -> None:
    report = quick("elastic", "--model", str(tiny_checkpoint))
    assert sides_of(report, "day_goodput_own_scaled_per_s") == {"split_equal", "triptych"}


@pytest.mark.long
def test_autoscale() -> None:
    report = quick("autoscale")
    assert sides_of(report, "gpu_seconds") == {"triptych", "monolith"}
    for name in ("triptych", "monolith"):
        assert report["figures"][f"gpu_seconds.{name}"] > 0
        assert report["figures"][f"most_instances.{name}"] >= 2


@pytest.mark.long
def test_cache(tiny_checkpoint: Path) -> None:
    """Its own checks tell whether anything was cached."""
    figures = quick("cache", "--model", str(tiny_checkpoint))["figures"]
    for kind, what in itertools.product(("second", "follow_up", "kv_evicted"), ("encoded", "decoded", "transferred")):
        assert figures[f"{kind}_{what}.{tiny_checkpoint.name}"] == 0
    assert figures[f"second_ratio.{tiny_checkpoint.name}"] < 1


@pytest.mark.long
def test_migration(tiny_checkpoint: Path) -> None:
    figures = quick("migration", "--model", str(tiny_checkpoint))["figures"]
    assert figures["prefill_ms"] > 0
    assert figures["switch_ms"] > 0
