"""Bailian traces of Qwen's users (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): jsonl, conversations, 16-token blocks.

A request of type `image` has one picture: the form says neither how many nor how large.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from triptych.loadgen.traces.form import Form, SessionStates
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceOptions

BLOCK_SIZE = 16  # tokens, as published
NO_PARENT = -1


class BailianRecord(msgspec.Struct):
    """timestamp: seconds. turn: from 1."""

    chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    parent_chat_id: int = NO_PARENT
    type: str = "text"
    turn: int = 1
    hash_ids: tuple[int, ...] = ()


def _converter(_options: TraceOptions) -> Callable[[BailianRecord], TraceRow]:
    roots: SessionStates[str] = SessionStates()  # of each chat_id: the first one of its conversation

    def to_row(record: BailianRecord) -> TraceRow:
        chat, parent = str(record.chat_id), str(record.parent_chat_id)
        root = chat if record.parent_chat_id == NO_PARENT else roots.get(parent, parent)
        roots.remember(chat, root)
        return TraceRow(
            record.timestamp,
            record.input_length,
            record.output_length,
            num_images=int(record.type == "image"),
            session=root,
            turn=record.turn - 1,
            prefix_ids=record.hash_ids,
            prefix_block_size=BLOCK_SIZE if record.hash_ids else 0,
        )

    return to_row


BAILIAN = Form("bailian", ("chat_id", "timestamp", "input_length", "output_length"), BailianRecord, _converter)
