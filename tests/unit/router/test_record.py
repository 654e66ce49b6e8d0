"""A request's phases: what can follow what, ends, attempts, and the trace that comes of the stamps."""

from __future__ import annotations

import pytest

from triptych.services.router.record import Phase, RequestRecord, StageStamp
from triptych.services.router.responses import trace_of
from triptych.shared.messages import InstanceId, StageTime


def test_the_way_of_a_request() -> None:
    record = RequestRecord("r", arrived_at_s=10.0, deadline_s=20.0)
    assert record.begin_attempt().request_id == "r-1"
    record.move(Phase.PREFILL)
    record.move(Phase.DECODE)
    assert record.begin_attempt().request_id == "r-2", "a lost instance: everything again, under an id of its own"
    record.move(Phase.PREFILL)
    assert record.end(Phase.FINISHED, 12.0)
    assert not record.end(Phase.CANCELLED, 13.0), "an end is final"
    assert (record.phase, record.ended_at_s) == (Phase.FINISHED, 12.0)
    assert record.remaining_s(19.0) == 1.0
    assert record.remaining_s(21.0) == 0.0


def test_a_first_token_is_due_half_way_to_the_deadline_at_the_latest() -> None:
    record = RequestRecord("r", 10.0, 30.0)
    assert record.slack_s(11.0) is None
    for due_at_s, slack_s in ((12.0, 1.0), (10.0, 0.0), (3600.0, 9.0)):
        record.due_at_s = due_at_s
        assert record.slack_s(11.0) == slack_s


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE, Phase.FINISHED])
def test_no_phase_is_skipped(phase: Phase) -> None:
    with pytest.raises(ValueError, match="cannot go"):
        RequestRecord("r", 0.0, 1.0).move(phase)


def test_nothing_follows_an_end() -> None:
    record = RequestRecord("r", 0.0, 1.0)
    record.end(Phase.CANCELLED, 0.5)
    with pytest.raises(ValueError, match="cannot go"):
        record.begin_attempt()


def test_the_trace_shows_the_attempt_that_counted() -> None:
    record = RequestRecord("r", 0.0, 1.0)
    record.begin_attempt().stamps.append(StageStamp("prefill", 0.1))
    stamps = record.begin_attempt().stamps
    told = StageTime("prefill", InstanceId("p"), 0.001, 0.0025, 0.5)
    stamps.append(StageStamp("prefill", 0.2))
    stamps[0].begin(InstanceId("p"), "why", 0.3)
    stamps[0].end(0.9, told)
    stamps.append(StageStamp("decode", 0.9))  # never sent
    times = {"queued_ms": 1.0, "transfer_ms": 2.5, "compute_ms": 500.0}
    assert trace_of(record) == {
        "attempts": 2,
        "stages": [{"stage": "prefill", "instance_id": "p", "reason": "why", **times}],
    }
