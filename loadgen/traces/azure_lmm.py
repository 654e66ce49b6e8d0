"""Azure LMM inference trace of 2025 (github.com/Azure/AzurePublicDataset, CC-BY 4.0): text and pictures, csv, read and written.

Its NumImages takes only values that are squares, almost surely of the true count: 66 % are 1, 4 % are 4, 15 % are 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec

from triptych.loadgen.traces.form import Form, epoch_s
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceOptions

COLUMNS = ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")
START = datetime(2024, 10, 15, 12, tzinfo=UTC)  # of the published trace


class AzureLmmRecord(msgspec.Struct):
    """time: `2024-10-15T12:00:00.269Z`."""

    time: datetime = msgspec.field(name="TIMESTAMP")
    images: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="NumImages")
    context_tokens: int = msgspec.field(name="ContextTokens")
    generated_tokens: int = msgspec.field(name="GeneratedTokens")


def true_count(num_images: int) -> int:
    """The root of NumImages, rounded for the sake of files of others."""
    return round(math.sqrt(num_images))


def _converter(options: TraceOptions) -> Callable[[AzureLmmRecord], TraceRow]:
    count: Callable[[int], int] = true_count if options.image_count == "sqrt" else int
    return lambda record: TraceRow(
        epoch_s(record.time), record.context_tokens, record.generated_tokens, num_images=count(record.images)
    )


def azure_lmm_line(row: TraceRow) -> str:
    """The row as the published trace would have it: the count squared, milliseconds, no word of sessions."""
    time = (START + timedelta(seconds=row.arrival_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"{time},{row.num_images**2},{row.num_context_tokens},{row.num_output_tokens}"


AZURE_LMM = Form("azure-lmm", COLUMNS, AzureLmmRecord, _converter)
