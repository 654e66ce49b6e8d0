"""A trace of any length is read in constant memory, and no further than rows are asked for."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from triptych.loadgen.traces.azure_lmm import AZURE_LMM, COLUMNS
from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.reader import REORDER_ROWS, csv_decoder, from_zero, in_time_order, numbered_lines, parsed
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.shaping import shaped
from triptych.loadgen.traces.trace import MalformedRows, TraceOptions

PEAK_BYTES = 1_500_000  # chosen: measured 0.3 to 0.9 MB, while all rows of the test take 3.6 MB


class EndlessFile(io.BytesIO):
    """Rows, one each second, for ever; counts those that were read."""

    num_read = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        self.num_read += 1
        minutes, seconds = divmod(self.num_read, 60)
        return f"2024-10-{1 + minutes // 1440:02}T{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}Z,4,100,10\n".encode()


def rows_of(file: BinaryIO, options: TraceOptions) -> Iterator[TraceRow]:
    malformed = MalformedRows()
    lines = parsed(numbered_lines(file, malformed), csv_decoder(list(COLUMNS)), AZURE_LMM.parser(options), malformed)
    return shaped(from_zero(in_time_order(lines, malformed)), options)


def test_reads_no_further_than_asked() -> None:
    file = EndlessFile()
    rows = rows_of(cast(BinaryIO, file), TraceOptions(image_rate_scale=2.5, speed_up=10))
    assert file.num_read == 0
    assert len(list(islice(rows, 1000))) == 1000
    assert file.num_read <= REORDER_ROWS + 1000


def test_memory_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    num_rows = 15_000
    with gzip.open(path, "wb", compresslevel=1) as packed:
        file = EndlessFile()
        packed.write((",".join(COLUMNS) + "\n").encode())
        packed.writelines(file.readline() for _ in range(num_rows))
    tracemalloc.start()
    try:
        count = sum(1 for _ in open_trace(path, TraceOptions(image_rate_scale=1.5)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count > num_rows
    assert peak < PEAK_BYTES
