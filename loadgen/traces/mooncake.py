"""Mooncake traces (github.com/kvcache-ai/Mooncake): jsonl, milliseconds, prompts as ids of 512-token blocks."""

from __future__ import annotations

import msgspec

from triptych.loadgen.traces.form import Form
from triptych.loadgen.traces.row import TraceRow

BLOCK_SIZE = 512  # tokens, as published


class MooncakeRecord(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _to_row(record: MooncakeRecord) -> TraceRow:
    return TraceRow(
        record.timestamp / 1000,
        record.input_length,
        record.output_length,
        prefix_ids=record.hash_ids,
        prefix_block_size=BLOCK_SIZE if record.hash_ids else 0,
    )


MOONCAKE = Form("mooncake", ("timestamp", "input_length", "output_length"), MooncakeRecord, lambda _options: _to_row)
