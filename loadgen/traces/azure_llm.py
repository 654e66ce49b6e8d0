"""Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset): text only, csv, one row a request."""

from __future__ import annotations

from datetime import datetime

import msgspec

from triptych.loadgen.traces.form import Form, epoch_s
from triptych.loadgen.traces.row import TraceRow


class AzureLlmRecord(msgspec.Struct):
    """time: `2023-11-16 18:17:03.9799600` in the files of 2023, `2024-05-10 00:00:00.009930+00:00` in those of 2024."""

    time: datetime = msgspec.field(name="TIMESTAMP")
    context_tokens: int = msgspec.field(name="ContextTokens")
    generated_tokens: int = msgspec.field(name="GeneratedTokens")


def _to_row(record: AzureLlmRecord) -> TraceRow:
    return TraceRow(epoch_s(record.time), record.context_tokens, record.generated_tokens)


AZURE_LLM = Form("azure-llm", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), AzureLlmRecord, lambda _options: _to_row)
