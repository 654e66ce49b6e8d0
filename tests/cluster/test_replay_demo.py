"""`loadgen replay --content world` against the demo cluster: under load it answers as well as when asked one by one."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from support.cluster import Cluster
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.options import ReplayOptions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.pictures import PictureOptions
from triptych.loadgen.replay.run import replay
from triptych.loadgen.report.results import OutcomesReader
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import MalformedRows, Trace

CHECKPOINT = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
NUM_REQUESTS, RATE_PER_S = 300, 12.0  # chosen: about what two cores can answer
MAX_TIES = 1  # answers that may differ: float ties, see "The parity rule"


async def outcomes_of(options: ReplayOptions) -> list[RequestOutcome]:
    options.out.mkdir()
    rows = (TraceRow(i / RATE_PER_S, 50, 10, num_images=i % 4) for i in range(NUM_REQUESTS))
    conditions = await replay(Trace("demo", "triptych", rows, MalformedRows()), options, Console(file=io.StringIO()))
    assert conditions.ended == "complete", conditions.message
    return sorted(OutcomesReader(options.out / "outcomes.jsonl"), key=lambda outcome: outcome.index)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_answers_under_load_are_those_of_the_unloaded_run(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = start_cluster(model_dir=CHECKPOINT)
    options = ReplayOptions(cluster.url, tmp_path / "alone", content="world", pictures=PictureOptions("world"))
    alone = await outcomes_of(replace(options, send=SendOptions(concurrency=1)))
    loaded = await outcomes_of(replace(options, out=tmp_path / "loaded"))
    assert {outcome.error for outcome in (*alone, *loaded)} == {None}
    right, right_under_load = [[bool(outcome.is_right) for outcome in outcomes] for outcomes in (alone, loaded)]
    print(f"right: {sum(right)} of {len(right)} alone, {sum(right_under_load)} under load")
    assert sum(right) > 0.5 * NUM_REQUESTS
    assert sum(a != b for a, b in zip(right, right_under_load, strict=True)) <= MAX_TIES
    assert cluster.stop() == 0
