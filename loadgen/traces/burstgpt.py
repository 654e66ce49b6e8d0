"""BurstGPT traces (github.com/HPMLL/BurstGPT): csv, seconds, text only; newer files name conversations.

A row without response tokens is a request that failed then: it counts as malformed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from triptych.loadgen.traces.form import Form, SessionStates
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceOptions


class BurstGptRecord(msgspec.Struct):
    timestamp: float = msgspec.field(name="Timestamp")
    request_tokens: int = msgspec.field(name="Request tokens")
    response_tokens: int = msgspec.field(name="Response tokens")
    session: str = msgspec.field(name="Session ID", default="")


def _converter(_options: TraceOptions) -> Callable[[BurstGptRecord], TraceRow]:
    turns: SessionStates[int] = SessionStates()  # of each conversation: how many turns it had

    def to_row(record: BurstGptRecord) -> TraceRow:
        if record.response_tokens == 0:
            raise ValueError("a failed request: it has no response tokens")
        turn = turns.get(record.session, 0) if record.session else 0
        if record.session:
            turns.remember(record.session, turn + 1)
        return TraceRow(
            record.timestamp, record.request_tokens, record.response_tokens, session=record.session or None, turn=turn
        )

    return to_row


BURSTGPT = Form("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), BurstGptRecord, _converter)
