"""Isolated latencies: which rows are sent alone, and what their latencies come to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from triptych.loadgen.replay.isolated import MAX_OUTPUT_TOKENS, line_through, measure_isolated, sample_rows, summary
from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import LatencyLine
from triptych.loadgen.traces.row import TraceRow


def outcome(size: int, ttft_s: float, tbt_s: float, error: str | None = None) -> RequestOutcome:
    """Sent 100 s late, as one of many that wait for each other; 5 tokens in 3 chunks."""
    first_s = 100 + ttft_s
    return RequestOutcome(
        index=0,
        request_class="text",
        num_images=0,
        scheduled_s=0,
        sent_s=100,
        end_s=200,
        first_token_s=first_s,
        last_token_s=first_s + 4 * tbt_s,
        token_gaps_s=(2 * tbt_s, 2 * tbt_s),
        num_prompt_tokens=size,
        num_output_tokens=5,
        error=error,
    )


def test_the_sample_spans_the_sizes_of_a_class() -> None:
    rows = [
        TraceRow(float(i), 1000 - i, 500, num_images=i % 2, session="s", prefix_ids=(1,), image_ids=(9,) * (i % 2))
        for i in range(1000)
    ]
    sample = sample_rows(rows, "image", 5)
    assert [row.num_context_tokens for row in sample] == [1, 251, 501, 749, 999]
    assert {(row.arrival_s, row.session, row.prefix_ids, row.image_ids, row.num_output_tokens) for row in sample} == {
        (0.0, None, (), (), MAX_OUTPUT_TOKENS)
    }
    assert len(sample_rows(rows[:3], "image", 5)) == 1
    assert sample_rows(rows[:1], "image", 5) == []


def test_latencies_count_from_sending() -> None:
    found = summary([outcome(100, 0.2, 0.01), outcome(200, 0.3, 0.01), outcome(400, 0.5, 0.01)])
    assert found.ttft_s == pytest.approx(0.3)
    assert found.ttft_line.at(300) == pytest.approx(0.4)
    assert found.tbt_s == pytest.approx(0.01)  # over tokens, not over chunks
    assert found.tbt_line is not None
    assert found.tbt_line.at(1000) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("sizes", "times_s", "line"),
    [
        ([10, 10], [1.0, 3.0], LatencyLine(2.0, 0.0)),
        ([10, 20], [3.0, 1.0], LatencyLine(2.0, 0.0)),  # noise: time does not fall with size
        ([10, 30], [1.0, 5.0], LatencyLine(0.0, 0.15)),  # no negative time for a small one
        ([10, 30], [2.0, 4.0], LatencyLine(1.0, 0.1)),
    ],
)
def test_lines(sizes: list[int], times_s: list[float], line: LatencyLine) -> None:
    found = line_through(sizes, times_s)
    assert (found.base_s, found.s_per_token) == (pytest.approx(line.base_s), pytest.approx(line.s_per_token))


def test_the_first_of_a_class_warms_up_and_failures_do_not_count() -> None:
    async def send(rows: Iterator[TraceRow]) -> list[RequestOutcome]:
        num = len(list(rows))
        return [
            outcome(10, 99.0, 0.01),
            *(outcome(10 * i, 0.1 * i, 0.01, "timeout" if i == 2 else None) for i in range(1, num)),
        ]

    rows = [TraceRow(0.0, 10 * i, 5) for i in range(1, 4)]
    found = asyncio.run(measure_isolated(rows, ["text", "image"], 3, send))
    assert set(found) == {"text"}
    assert found["text"].num_requests == 2
    assert found["text"].ttft_s == pytest.approx(0.2)
