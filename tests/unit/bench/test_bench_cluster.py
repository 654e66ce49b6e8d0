"""Bench cluster's own arithmetic: which requests are known to a cache, the knee, figures of each kind, the bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.loadgen.bench.chat_reuse import (
    ALL,
    HASTE,
    KINDS,
    KNOWN,
    MAX_IMAGES,
    NEW,
    PICTURES,
    TEXT,
    chat_trace,
    figures_by_kind,
    first_shown,
    flat,
    kinds_of,
    kinds_of_repeats,
)
from triptych.loadgen.bench.cluster import (
    COLD,
    FULL,
    MAX_RATIO,
    MIN_NEW,
    OURS,
    THEIRS,
    WARM,
    ClusterOptions,
    Found,
    Replayed,
    Scale,
    _bars,
    _ClusterBench,
    knee_of,
    num_past_knee,
    our_options,
    telling_seed,
)
from triptych.loadgen.bench.measured_cluster import REQUEST_TIMEOUT_S
from triptych.loadgen.replay.conditions import Conditions
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, LatencyLine, parse_slos
from triptych.loadgen.report.schema import ClassFigures
from triptych.loadgen.traces.row import TraceRow

ISOLATED = Isolated(8, 0.1, LatencyLine(0.0, 0.001), 0.01, LatencyLine(0.01, 0.0))
CONDITIONS = Conditions("", "", "real", {}, "", "", "", 0, {}, slos=parse_slos(["ttft=5x,tbt=5x"]), isolated={"text": ISOLATED})


def asks(session: str, *pictures: int, turn: int = 0) -> TraceRow:
    return TraceRow(0, 9, 9, num_images=len(pictures), image_ids=pictures, session=session, turn=turn)


def test_what_is_known_goes_by_the_pictures_of_the_conversation() -> None:
    """Sent one a second, answered in half of one."""
    rows = [
        asks("a"),
        asks("b", 1, 2),
        asks("b", turn=1),
        asks("c", 2),
        asks("d", 2, 3),
        asks("a", turn=1),
        asks("c", turn=1),
        asks("c", 4, turn=2),
        asks("c", turn=3),
    ]
    outcomes = [outcome(index, 0.5) for index in range(len(rows))]
    assert kinds_of(rows, [outcomes, outcomes]) == [TEXT, NEW, KNOWN, KNOWN, NEW, TEXT, KNOWN, NEW, KNOWN]
    assert list(first_shown(rows)) == [rows[1], rows[4], rows[7]]


def test_a_picture_is_known_once_both_sides_have_answered_about_it() -> None:
    """The second one who asks about it comes before the first token at one side only; the third one after it at both."""
    rows = [asks("a", 1), asks("b", 1), asks("c", 1)]
    quick, slow = ([outcome(0, first_s), outcome(1, 0.5), outcome(2, 0.5)] for first_s in (0.5, 1.9))
    assert kinds_of(rows, [quick, quick]) == [NEW, KNOWN, KNOWN]
    assert kinds_of(rows, [quick, slow]) == kinds_of(rows, [slow, quick]) == [NEW, NEW, KNOWN]
    late = replace(slow[1], sent_s=2.5)
    assert kinds_of(rows, [[slow[0], late, slow[2]], quick]) == [NEW, KNOWN, KNOWN], "by when it was sent, not scheduled"


def test_the_answer_that_came_first_makes_a_picture_known() -> None:
    """Outcomes are in the order in which requests ended, and warm-up ones count."""
    rows = [asks("a", 1), asks("b", 1), asks("c", 1), asks("c", turn=1)]
    outcomes = [outcome(2, 0.5), outcome(3, 0.5), outcome(1, 0.5, is_warm_up=True), outcome(0, 9.0)]
    assert kinds_of(rows, [outcomes, outcomes]) == [NEW, NEW, KNOWN, KNOWN]


def test_a_failed_request_makes_nothing_known() -> None:
    rows = [asks("a", 1), asks("a", turn=1), asks("b", 1), asks("b", turn=1)]
    well = [outcome(index, 0.5) for index in range(len(rows))]
    broken = replace(well[0], error="broken_stream")  # after its first token
    for failed in (outcome(0, 0.5, error="http_503"), broken):
        assert kinds_of(rows, [well, [failed, *well[1:]]]) == [NEW, NEW, NEW, KNOWN]
    assert kinds_of(rows, [well, well]) == [NEW, KNOWN, KNOWN, KNOWN]


def test_both_sides_figures_are_of_the_same_requests(tmp_path: Path) -> None:
    """What is known is told by the cold replays alone, however slow the warm ones are."""
    bench = _ClusterBench(ClusterOptions(Path(), Path()), Scale(60.0, 0.0, ()), tmp_path)
    rows = list(chat_trace(1.0, bench.scale.duration_s, seed=1))
    at_once = [outcome_of(row, index, first_token_s=row.arrival_s) for index, row in enumerate(rows)]
    slowly = [outcome_of(row, index, first_token_s=row.arrival_s + 5) for index, row in enumerate(rows)]
    at_the_end = [outcome_of(row, index, first_token_s=60.0) for index, row in enumerate(rows)]
    replays = {(COLD, OURS): at_once, (COLD, THEIRS): slowly, (WARM, OURS): at_the_end, (WARM, THEIRS): at_once}
    bench._take_in({key: Replayed(outcomes, CONDITIONS) for key, outcomes in replays.items()}, 1.0, seed=1)
    counts = {
        (name, side): {kind: found.num_requests for kind, found in figures.items()}
        for (name, _, side), figures in bench.found.items()
    }
    assert counts[COLD, OURS] == counts[COLD, THEIRS]
    assert list(counts[COLD, OURS]) == [ALL, TEXT, PICTURES, KNOWN, NEW]
    assert counts[COLD, OURS][NEW] == kinds_of(rows, [slowly]).count(NEW) > kinds_of(rows, [at_once]).count(NEW)
    assert counts[WARM, OURS] == counts[WARM, THEIRS]
    assert list(counts[WARM, OURS]) == [ALL, TEXT, PICTURES, KNOWN]


def test_all_is_known_when_it_is_sent_again() -> None:
    assert kinds_of_repeats([TEXT, NEW, KNOWN]) == [TEXT, KNOWN, KNOWN]


def test_ours_is_told_the_smallest_limit_between_tokens_and_none_of_first_tokens() -> None:
    options = our_options({"text": replace(ISOLATED, tbt_s=0.03), "image": replace(ISOLATED, tbt_s=0.02)})
    assert options["--slo-tbt-s"] == pytest.approx(0.1)
    assert not any("slo-ttft" in name for name in options)


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_rows_come_at_the_rate(rate: float) -> None:
    rows = list(chat_trace(rate, 600.0, seed=1))
    steady = [row for row in rows if row.arrival_s > 100 / HASTE]
    assert len(steady) / (600 - 100 / HASTE) == pytest.approx(rate, rel=0.25)  # long conversations end early
    assert rows[-1].arrival_s < 600
    assert max(row.num_images for row in rows) == MAX_IMAGES
    assert all(row.session and len(row.image_ids) == row.num_images for row in rows)
    at_once = [outcome_of(row, index, first_token_s=row.arrival_s) for index, row in enumerate(rows)]
    assert set(kinds_of(rows, [at_once])) == set(KINDS)


def test_a_replay_has_enough_requests_with_new_pictures() -> None:
    seed = telling_seed(1.0, FULL, first=1)
    rows = first_shown(chat_trace(1.0, FULL.duration_s, seed))
    assert sum(row.arrival_s >= FULL.warm_up_s for row in rows) >= MIN_NEW
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


def outcome_of(row: TraceRow, index: int, first_token_s: float) -> RequestOutcome:
    return replace(outcome(index, 0.0), scheduled_s=row.arrival_s, sent_s=row.arrival_s, first_token_s=first_token_s)


def figures(*outcomes: RequestOutcome, kinds: Sequence[str]) -> dict[str, ClassFigures]:
    return figures_by_kind(outcomes, kinds, CONDITIONS)


def test_figures_of_each_kind() -> None:
    found = figures(
        outcome(0, 9.0, is_warm_up=True),
        outcome(1, 0.2),
        outcome(2, 0.6),
        outcome(3, 0.0, error="http_503"),
        outcome(4, 1.0),
        kinds=[NEW, TEXT, KNOWN, KNOWN, NEW],
    )
    assert {row: one.num_requests for row, one in found.items()} == {ALL: 4, TEXT: 1, PICTURES: 3, KNOWN: 2, NEW: 1}
    values = dict(flat(found))
    assert values["text_ttft_p99_s"] == pytest.approx(0.2, rel=0.01)
    assert values["known_pictures_ttft_p99_s"] == pytest.approx(REQUEST_TIMEOUT_S, rel=0.01), "it waits for ever"
    assert (values["all_requests"], values["failed"]) == (4, 1)
    assert values["attainment_own_scaled"] == pytest.approx(1 / 4), "two are late, one failed"
    assert values["goodput_own_scaled_per_s"] == pytest.approx(1 / 5), "of five seconds"


def measured(ttft_s: float, num_late: int = 0) -> dict[str, ClassFigures]:
    outcomes = [outcome(index, 9.0 if index < num_late else ttft_s) for index in range(12)]
    return figures(*outcomes, kinds=KINDS * 4)


def measured_at(rates: Sequence[float], too_much: Sequence[float] = ()) -> Found:
    """vLLM, of which rates are too much, and ours, which does all in a quarter of its time."""
    found: Found = {(name, rate, OURS): measured(0.1) for name in (COLD, WARM) for rate in rates}
    num_late = {rate: 4 if rate in too_much else 0 for rate in rates}
    return found | {(name, rate, THEIRS): measured(0.4, num_late[rate]) for name in (COLD, WARM) for rate in rates}


def test_bars_compare_each_rate_and_the_goodput_of_the_highest() -> None:
    found = measured_at([1.0, 2.0], too_much=[2.0])
    bars = _bars(found)
    assert len(bars) == 2 * len(MAX_RATIO) + 1
    assert all(bar.holds for bar in bars.values())
    alike = _bars(found | {(name, 2.0, OURS): measured(0.1, num_late=4) for name in (COLD, WARM)})
    assert "cold_goodput_own_scaled_ratio_2.00/s" in [name for name, bar in alike.items() if not bar.holds]
    slow = _bars(found | {(name, 1.0, OURS): measured(0.3) for name in (COLD, WARM)})
    assert [name for name, bar in slow.items() if not bar.holds] == [
        "cold_text_ttft_p99_ratio_1.00/s",
        "warm_text_ttft_p99_ratio_1.00/s",
        "warm_known_pictures_ttft_p99_ratio_1.00/s",
    ]


def test_where_both_do_all_that_is_asked_nobody_is_to_have_more_goodput() -> None:
    bars = _bars(measured_at([1.0, 2.0]))
    assert len(bars) == 2 * len(MAX_RATIO)
    assert all(bar.holds for bar in bars.values())


def test_the_knee_is_the_highest_rate_that_vllm_keeps_up_with() -> None:
    def knee(rates: Sequence[float], too_much: Sequence[float]) -> tuple[float | None, int]:
        found = measured_at(rates, too_much)
        return knee_of(found), num_past_knee(found)

    assert knee([1.0, 2.0], []) == (2.0, 0)
    assert knee([1.0, 2.0, 3.0], [2.0, 3.0]) == (1.0, 2)
    assert knee([1.0, 2.0], [1.0, 2.0]) == (None, 2)
    assert knee([1.0, 2.0, 3.0], [1.0, 3.0]) == (2.0, 1), "one that was too much by chance"
