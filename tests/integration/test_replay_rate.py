"""How much the replay's client can send from one core before the client is what is measured: minutes, and a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.report.results import OutcomesReader, read_report
from triptych.loadgen.traces.own import own_line
from triptych.loadgen.traces.row import TraceRow

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [pytest.mark.long, pytest.mark.skipif(len(CORES) < 2, reason="one core each for client and stub")]

NUM_CHUNKS = 16
SECONDS = 30
MAX_LAG_P99_S = 0.020
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


PINNED = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def on_core(number: int, *arguments: str) -> list[str]:
    """Python on one of our cores."""
    return [sys.executable, "-c", PINNED, str(CORES[number]), *arguments]


@pytest.fixture
def stub_url() -> Iterator[str]:
    command = on_core(1, "-m", "support.stub_target", "--chunks", str(NUM_CHUNKS), "--gap-s", "0.05")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize(("rate_per_s", "num_images"), [(500, 0), (50, 1), (50, 3)])
def test_send_lag_on_one_core(rate_per_s: int, num_images: int, stub_url: str, tmp_path: Path) -> None:
    num = rate_per_s * SECONDS
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out"
    rows = (TraceRow(i / rate_per_s, 1000 + 400 * num_images, NUM_CHUNKS, num_images=num_images) for i in range(num))
    trace.write_text("".join(f"{own_line(row)}\n" for row in rows))
    command = ("-m", "triptych.loadgen.cli", "replay", str(trace), "--target", stub_url, "--out", str(out))
    done = subprocess.run(on_core(0, *command), env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report = read_report(out)
    assert report.send_lag_s is not None
    print(f"{rate_per_s}/s, {num_images} pictures: send lag p50 {report.send_lag_s.p50}, p99 {report.send_lag_s.p99} s")
    outcomes: list[RequestOutcome] = list(OutcomesReader(out / "outcomes.jsonl"))
    assert len(outcomes) == num
    assert {(outcome.error, len(outcome.token_gaps_s)) for outcome in outcomes} == {(None, NUM_CHUNKS - 1)}
    assert report.send_lag_s.p99 < MAX_LAG_P99_S
