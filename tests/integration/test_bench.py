"""Each benchmark really runs, with tiny sizes: that it measures and reports, not how fast anything is."""

from __future__ import annotations

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
