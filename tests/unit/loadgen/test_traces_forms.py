"""Each published form of trace, from a small example of our own, told by its content."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceOptions
from triptych.loadgen.traces.writer import write_trace

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.5+00:00,2399,0
"""
AZURE_LMM = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-10-15T12:00:00.269Z,0,770,491
2024-10-15T12:00:01.819Z,9,949,126
2024-10-15T12:00:02.269Z,900,9949,12
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1500, "output_length": 40, "hash_ids": [1, 2, 3]}
{"timestamp": 3500, "input_length": 600, "output_length": 5, "hash_ids": [1, 9]}
"""
BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 32, "output_length": 9, \
"type": "text", "turn": 1, "hash_ids": [4, 5]}
{"chat_id": 8, "parent_chat_id": 7, "timestamp": 63.5, "input_length": 64, "output_length": 3, \
"type": "image", "turn": 2, "hash_ids": [4, 5, 6, 7]}
{"chat_id": 9, "parent_chat_id": 8, "timestamp": 65.0, "input_length": 70, "output_length": 3, \
"type": "text", "turn": 3, "hash_ids": []}
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,0.5,ChatGPT,472,18,490,Conversation log
45,s1,1,GPT-4,1087,230,1317,Conversation log
46,,1,GPT-4,87,23,110,API log
"""
OWN = """{"arrival_s":0,"num_context_tokens":10,"num_output_tokens":2}
{"arrival_s":1.5,"num_context_tokens":20,"num_output_tokens":3,"num_images":2,"num_image_tokens":8,"session":"a","turn":1}
"""
EXAMPLES: dict[str, tuple[str, str, list[TraceRow]]] = {
    "2023": ("azure-llm", AZURE_2023, [TraceRow(0, 4808, 10), TraceRow(0.052, 3180, 8)]),
    "2024": ("azure-llm", AZURE_2024, [TraceRow(0, 2162, 5), TraceRow(0.49007, 2399, 1)]),
    "lmm": (
        "azure-lmm",
        AZURE_LMM,
        [TraceRow(0, 770, 491), TraceRow(1.55, 949, 126, num_images=3), TraceRow(2, 9949, 12, num_images=16)],
    ),
    "mooncake": (
        "mooncake",
        MOONCAKE,
        [
            TraceRow(0, 1500, 40, prefix_ids=(1, 2, 3), prefix_block_size=512),
            TraceRow(2.5, 600, 5, prefix_ids=(1, 9), prefix_block_size=512),
        ],
    ),
    "bailian": (
        "bailian",
        BAILIAN,
        [
            TraceRow(0, 32, 9, session="7", turn=0, prefix_ids=(4, 5), prefix_block_size=16),
            TraceRow(2.5, 64, 3, num_images=1, session="7", turn=1, prefix_ids=(4, 5, 6, 7), prefix_block_size=16),
            TraceRow(4, 70, 3, session="7", turn=2),
        ],
    ),
    "burstgpt": (
        "burstgpt",
        BURSTGPT,
        [TraceRow(0, 472, 18, session="s1"), TraceRow(40, 1087, 230, session="s1", turn=1), TraceRow(41, 87, 23)],
    ),
    "own": (
        "triptych",
        OWN,
        [TraceRow(0, 10, 2), TraceRow(1.5, 20, 3, num_images=2, num_image_tokens=8, session="a", turn=1)],
    ),
}


def assert_same(rows: list[TraceRow], expected: list[TraceRow]) -> None:
    """Times to the microsecond: Azure's are dates, which a float holds to less than that."""
    assert [row.arrival_s for row in rows] == pytest.approx([row.arrival_s for row in expected], abs=1e-6)
    without_times = [[getattr(row, name) for name in TraceRow.__slots__ if name != "arrival_s"] for row in rows]
    assert without_times == [[getattr(row, name) for name in TraceRow.__slots__ if name != "arrival_s"] for row in expected]


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("packed", [False, True])
def test_reads(tmp_path: Path, example: str, packed: bool) -> None:
    form, text, expected = EXAMPLES[example]
    path = tmp_path / "trace.dat"  # the name tells nothing
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = open_trace(path)
    assert trace.form == form
    assert_same(list(trace), expected)
    assert trace.malformed.count == 0


@pytest.mark.parametrize("example", EXAMPLES)
def test_marks_of_other_systems_are_no_content(tmp_path: Path, example: str) -> None:
    """A byte order mark, line ends of Windows, blank lines, no line end at the end, spaces after commas of a header."""
    form, text, expected = EXAMPLES[example]
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + text.rstrip().replace("\n", "\r\n\r\n").replace("S,", "S, ").encode())
    trace = open_trace(str(path))
    assert trace.form == form
    assert_same(list(trace), expected)


@pytest.mark.parametrize(("options", "counts"), [
    (TraceOptions(image_count="raw"), [0, 9, 16]),
    (TraceOptions(image_count="raw", max_images=None), [0, 9, 900]),
    (TraceOptions(max_images=None), [0, 3, 30]),
    (TraceOptions(max_images=0), [0, 0, 0]),
])  # fmt: skip
def test_image_counts_of_azure_lmm(tmp_path: Path, options: TraceOptions, counts: list[int]) -> None:
    path = tmp_path / "lmm.csv"
    path.write_text(AZURE_LMM)
    assert [row.num_images for row in open_trace(path, options)] == counts


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.csv", "out.csv.gz"])
def test_written_rows_are_read_again(tmp_path: Path, name: str) -> None:
    """Azure's form holds sessions, prefixes and tokens of pictures of none, and times to the millisecond."""
    rows = [TraceRow(0, 100, 7), TraceRow(1.25, 900, 1, num_images=4), TraceRow(2.5, 30, 2)]
    if "jsonl" in name:
        rows += [TraceRow(3, 64, 5, 1, 32, "chat", 2, (1 << 60, 5), 16)]
    write_trace(rows, tmp_path / name)
    trace = open_trace(tmp_path / name)
    assert trace.form == ("triptych" if "jsonl" in name else "azure-lmm")
    assert_same(list(trace), rows)


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.csv.gz", "b.csv.gz"):
        write_trace([TraceRow(0, 100, 7)], tmp_path / name)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()


def test_conversations_that_began_before_the_trace(tmp_path: Path) -> None:
    """Both answers to a chat that the trace does not hold are of one conversation."""
    path = tmp_path / "bailian.jsonl"
    line = '{{"chat_id": {}, "parent_chat_id": 3, "timestamp": {}, "input_length": 9, "output_length": 9, "turn": 5}}'
    path.write_text("\n".join(line.format(chat, chat) for chat in (8, 9)))
    assert [(row.session, row.turn) for row in open_trace(path)] == [("3", 4), ("3", 4)]


def test_empty_cells_of_our_own_form_are_no_conversation(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("arrival_s,num_context_tokens,num_output_tokens,session\n0,1,1,\n1,1,1,a\n")
    assert [row.session for row in open_trace(path)] == [None, "a"]
