"""The README's examples, run as they stand but for the port, and the demo that a newcomer runs first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 100
ANSWER = "a red circle and a blue square"  # as the README promises
DEMO_TIMEOUT_S = 240  # it starts a cluster of its own


def _example(start: str, cluster: Cluster) -> str:
    """The code block whose text begins with `start`, against the cluster."""
    blocks = re.findall(r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [block] = [block for block in blocks if block.startswith(start)]
    assert "http://127.0.0.1:8000" in block
    return str(block).replace("http://127.0.0.1:8000", cluster.url)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo drew its pictures."""
    from triptych.loadgen.demo import draw_pictures

    monkeypatch.chdir(tmp_path)
    draw_pictures()
    return tmp_path


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_example(demo_cluster: Cluster, folder: Path) -> None:
    answer = json.loads(_run(["bash", "-c", _example("curl", demo_cluster)], folder))
    assert answer["choices"][0]["message"]["content"] == ANSWER, answer
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0, answer


def test_sdk_example(demo_cluster: Cluster, folder: Path) -> None:
    assert _run([sys.executable, "-c", _example("import base64", demo_cluster)], folder).strip() == "green"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_demo(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Elsewhere than in the checkout, with a checkpoint that is there already."""
    made = tmp_path / "build" / "checkpoints" / "tiny"
    made.parent.mkdir(parents=True)
    shutil.copytree(tiny_checkpoint, made)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "triptych.loadgen.demo"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "random" in done.stdout
    assert "All three answered" in done.stdout
    stages = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"(preprocess|encoder|prefill|decode) ", line)]
    num_pictures = {"preprocess": 2, "encoder": 3}  # the first one is in two questions, and is decoded once
    assert {stage: stages.count(stage) for stage in num_pictures} == num_pictures
    assert [stages.count(stage) for stage in ("prefill", "decode")] == [3, 3]
