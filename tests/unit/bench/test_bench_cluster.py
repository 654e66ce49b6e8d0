"""Bench cluster's own arithmetic: which requests are known to a cache, the knee, figures of each kind, the bars."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from triptych.loadgen.bench.chat_reuse import (
    ALL,
    HASTE,
    KINDS,
    KNOWN,
    MAX_IMAGES,
    NEW,
    TEXT,
    figures_by_kind,
    flat,
    kinds_of,
    rows_at,
)
from triptych.loadgen.bench.cluster import COLD, FULL, MAX_RATIO, MIN_NEW, OURS, THEIRS, WARM, Found, Scale, _bars, telling_seed
from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, LatencyLine, parse_slos
from triptych.loadgen.report.schema import ClassFigures
from triptych.loadgen.traces.row import TraceRow

ISOLATED = Isolated(8, 0.1, LatencyLine(0.0, 0.001), 0.01, LatencyLine(0.01, 0.0))
CONDITIONS = Conditions("", "", "real", {}, "", "", "", 0, {}, slos=parse_slos(["ttft=5x,tbt=5x"]), isolated={"text": ISOLATED})


def test_what_is_known_is_told_by_conversations_and_pictures() -> None:
    rows = [
        TraceRow(0, 9, 9, session="a"),
        TraceRow(1, 9, 9, num_images=2, image_ids=(1, 2), session="b"),
        TraceRow(2, 9, 9, session="b", turn=1),
        TraceRow(3, 9, 9, num_images=1, image_ids=(2,), session="c"),
        TraceRow(4, 9, 9, num_images=2, image_ids=(2, 3), session="d"),
        TraceRow(5, 9, 9, session="a", turn=1),
        TraceRow(6, 9, 9, session="c", turn=1),
    ]
    assert list(kinds_of(rows)) == [TEXT, NEW, KNOWN, KNOWN, NEW, TEXT, KNOWN]


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_rows_come_at_the_rate(rate: float) -> None:
    rows = rows_at(rate, 600.0, seed=1)
    steady = [row for row in rows if row.arrival_s > 100 / HASTE]
    assert len(steady) / (600 - 100 / HASTE) == pytest.approx(rate, rel=0.25)  # long conversations end early
    assert rows[-1].arrival_s < 600
    assert max(row.num_images for row in rows) == MAX_IMAGES
    kinds = list(kinds_of(rows))
    assert {kind: kinds.count(kind) > 0 for kind in KINDS} == dict.fromkeys(KINDS, True)


def test_a_replay_has_enough_requests_with_new_pictures() -> None:
    seed = telling_seed(1.0, FULL, first=1)
    rows = rows_at(1.0, FULL.duration_s, seed)
    late = [kind for row, kind in zip(rows, kinds_of(rows), strict=True) if row.arrival_s >= FULL.warm_up_s]
    assert late.count(NEW) >= MIN_NEW
    assert telling_seed(1.0, Scale(0.5, 0.1, (1.0,)), first=7) == 7, "too short for any"


def outcome(index: int, ttft_s: float, error: str | None = None, is_warm_up: bool = False) -> RequestOutcome:
    return RequestOutcome(
        index=index,
        request_class="text",
        num_images=0,
        scheduled_s=float(index),
        sent_s=float(index),
        end_s=index + ttft_s + 1,
        first_token_s=None if error else index + ttft_s,
        last_token_s=None if error else index + ttft_s + 0.02,
        token_gaps_s=() if error else (0.02,),
        num_prompt_tokens=0 if error else 100,
        num_output_tokens=0 if error else 2,
        error=error,
        is_warm_up=is_warm_up,
    )


def figures(*outcomes: RequestOutcome, kinds: Sequence[str]) -> dict[str, ClassFigures]:
    return figures_by_kind(outcomes, kinds, CONDITIONS)


def test_figures_of_each_kind() -> None:
    found = figures(
        outcome(0, 9.0, is_warm_up=True),
        outcome(1, 0.2),
        outcome(2, 0.6),
        outcome(3, 0.0, error="http_503"),
        kinds=[NEW, TEXT, KNOWN, KNOWN],
    )
    assert list(found) == [ALL, TEXT, KNOWN]
    values = dict(flat(found))
    assert values["text_ttft_p99_s"] == pytest.approx(0.2, rel=0.01)
    assert values["known_pictures_ttft_p99_s"] == pytest.approx(REQUEST_TIMEOUT_S, rel=0.01), "it waits for ever"
    assert (values["all_requests"], values["failed"]) == (3, 1)
    assert values["attainment_own_scaled"] == pytest.approx(1 / 3), "one is late, one failed"
    assert values["goodput_own_scaled_per_s"] == pytest.approx(1 / 3), "of three seconds"


def test_bars_compare_each_rate_and_each_sides_best_goodput() -> None:
    def measured(ttft_s: float, num_late: int) -> dict[str, ClassFigures]:
        outcomes = [outcome(index, 9.0 if index < num_late else ttft_s) for index in range(12)]
        return figures(*outcomes, kinds=KINDS * 4)

    found: Found = {(name, rate, THEIRS): measured(0.4, num_late=0) for name in (COLD, WARM) for rate in (1.0, 2.0)}
    found |= {(name, rate, OURS): measured(0.1, num_late=0) for name in (COLD, WARM) for rate in (1.0, 2.0)}
    bars = _bars(found)
    assert len(bars) == 2 * 2 * len(MAX_RATIO) + 1
    assert [name for name, bar in bars.items() if not bar.holds] == ["cold_goodput_own_scaled_ratio"]
    slow = _bars(found | {(COLD, 2.0, OURS): measured(0.3, num_late=0)})
    assert [name for name, bar in slow.items() if not bar.holds and "ttft" in name] == [
        "cold_text_ttft_p99_ratio_2.00/s",
        "cold_known_pictures_ttft_p99_ratio_2.00/s",
    ]
    late = found | {(name, rate, THEIRS): measured(0.4, num_late=4) for name in (COLD, WARM) for rate in (1.0, 2.0)}
    assert all(bar.holds for bar in _bars(late).values())
