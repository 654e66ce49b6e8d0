"""What is no trace is refused with words for the user; rows that are none are counted, with their lines, and left out."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from triptych.loadgen.traces import reader
from triptych.loadgen.traces.open import open_trace
from triptych.loadgen.traces.trace import MAX_KEPT, TraceError, TraceOptions

HEADER = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"


def lmm_line(second: float, num_images: object = 0) -> str:
    minutes, seconds = divmod(second, 60)
    return f"2024-10-15T12:{int(minutes):02}:{seconds:06.3f}Z,{num_images},100,10\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("a,b\n1,2\n", "has the columns a, b: no known form of trace; known are azure-lmm (TIMESTAMP, NumImages,"),
        ('{"q": 1}\n', "has the keys q: no known form"),
        ("TIMESTAMP,NumImages,ContextTokens\nx\n", "looks like azure-lmm, but has no GeneratedTokens"),
        ('{"timestamp": 1, "input_length": 2}\n', "but has no output_length"),
        ('{"timestamp": 1,\n', "its first line is no JSON object"),
        ('[{"timestamp": 1}]\n', "no known form"),
        ('{"timestamp": ' + "[" * 10_000 + "\n", "its first line is no JSON object"),
        ("2024-10-15T12:00:00Z,0,1,1\n", "no known form"),
        (HEADER, "azure-lmm without a row that can be used"),
        (HEADER + "x\ny\n", "without a row that can be used, 2 malformed; line 2: 1 values, the header has 4"),
        ("\x1b[2J\x00,b\n", r"has the columns \x1b[2J\x00, b"),
    ],
)
def test_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert told in str(caught.value)
    assert str(caught.value).startswith("trace.csv: ")
    assert "\n" not in str(caught.value)


def test_long_headers_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"column{i}" for i in range(10_000)))
    with pytest.raises(TraceError, match=r"column0, .*\.\.\.: no known form") as caught:
        open_trace(path)
    assert len(str(caught.value)) < 1000


def test_no_file() -> None:
    with pytest.raises(TraceError, match="no such file, and no workload: those are azure-lmm, bursts, chat-reuse, day"):
        open_trace("burst")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="directory"):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x,0,1,1", "Invalid RFC3339"),
        ("2024-10-15T12:00:01Z,0,1", "3 values, the header has 4"),
        ("2024-10-15T12:00:01Z,0,1,1,1", "5 values, the header has 4"),
        ("2024-10-15T12:00:01Z,-1,1,1", "Expected `int` >= 0"),
        ("2024-10-15T12:00:01Z,0,-5,1", "a count is not within 0 and"),
        ("2024-10-15T12:00:01Z,0,99999999999,1", "a count is not within 0 and"),
        ("2024-10-15T12:00:01Z,0,ten,1", "Expected `int`, got `str` - at `$.ContextTokens`"),
        ("2024-10-15T12:00:01Z,0,1.5,1", "Expected `int`"),
        ('2024-10-15T12:00:01Z,0,1,"1', "unexpected end of data"),
        ("2024-10-15T12:00:01Z,0,\xff\xfe,1", "Expected `int`"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes((HEADER + lmm_line(0)).encode() + line.encode("latin-1") + b"\n" + lmm_line(2).encode())
    trace = open_trace(path)
    assert [row.arrival_s for row in trace] == [0, 2]
    assert trace.malformed.count == 1
    assert trace.malformed.first[0].line_number == 3
    assert reason in trace.malformed.first[0].reason


MOONCAKE = '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [%s]}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (MOONCAKE % -1, "the name of a prefix block is not within 0 and 2^63"),
        (MOONCAKE % 2**63, "the name of a prefix block is not within 0 and 2^63"),
        (MOONCAKE % ("[" * 10_000), ""),
        (MOONCAKE.replace("1", "1e999") % 1, "out of range"),
        (MOONCAKE.replace("5", "true", 1) % 1, "Expected `int`, got `bool` - at `$.input_length`"),
        (MOONCAKE.replace("5", "1e30", 1) % 1, "Expected `int`, got `float` - at `$.input_length`"),
        (MOONCAKE.replace("5", "99999999999", 1) % 1, "a count is not within 0 and"),
        ("null\n", "Expected `object`, got `null`"),
        ("[" * 10_000 + "\n", ""),
    ],
)
def test_malformed_objects_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE % 1 + line + MOONCAKE % (2**63 - 1))
    trace = open_trace(path)
    assert [row.prefix_ids for row in trace] == [(1,), (2**63 - 1,)]
    assert (trace.malformed.count, trace.malformed.first[0].line_number) == (1, 2)
    assert reason in trace.malformed.first[0].reason


OWN = '{"arrival_s": 1, "num_context_tokens": 5, "num_output_tokens": 5, "num_images": 1, "image_ids": [%s]}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (OWN % -1, "the name of a picture is not within 0 and 2^63"),
        (OWN % "1, 2", "2 names of pictures where there are 1"),
    ],
)
def test_malformed_names_of_pictures_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(OWN % 1 + line + OWN % "")
    trace = open_trace(path)
    assert [row.image_ids for row in trace] == [(1,), ()]
    assert reason in trace.malformed.first[0].reason


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_times_are_numbers(tmp_path: Path, value: str) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,x,1,1,2,l\n{value},x,1,1,2,l\n")
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert trace.malformed.count == 1


def test_failed_requests_of_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n1,x,1,1\n2,x,1,0\n3,x,1,1\n")
    trace = open_trace(path)
    assert [row.arrival_s for row in trace] == [0, 2]
    assert "failed request" in trace.malformed.first[0].reason


def test_all_are_counted_few_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + lmm_line(0) + "broken\n" * 500)
    trace = open_trace(path)
    assert len(list(trace)) == 1
    assert trace.malformed.count == 500
    assert [row.line_number for row in trace.malformed.first] == list(range(3, 3 + MAX_KEPT))


def test_a_file_that_is_not_read_to_its_end_can_be_closed(tmp_path: Path) -> None:
    """Whoever leaves it open is warned, which fails a test."""
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((HEADER + "".join(lmm_line(second) for second in range(3000))).encode()))
    trace = open_trace(path)
    next(trace)
    trace.close()
    with pytest.raises(ValueError, match="closed"):
        list(trace)


def test_a_download_that_was_cut(tmp_path: Path) -> None:
    """What is there is read; the cut is told."""
    path = tmp_path / "trace.csv.gz"
    text = HEADER + "".join(lmm_line(second, random.Random(second).randrange(99)) for second in range(3000))
    packed = gzip.compress(text.encode())
    path.write_bytes(packed[: len(packed) // 2])
    trace = open_trace(path)
    num_rows = len(list(trace))
    assert 0 < num_rows < 3000
    assert trace.malformed.count == 1
    assert "cannot be read from here on" in trace.malformed.first[0].reason


def test_lines_far_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not held in memory, and count as one line each."""
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 64)
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + lmm_line(0) + "x" * 1000 + "\n" + lmm_line(1) + "bad\n")
    trace = open_trace(path)
    assert [row.arrival_s for row in trace] == [0, 1]
    assert [row.line_number for row in trace.malformed.first] == [3, 5]


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    seconds = list(range(reader.REORDER_ROWS))
    random.Random(0).shuffle(seconds)
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(map(lmm_line, seconds)))
    trace = open_trace(path)
    assert [row.arrival_s for row in trace] == pytest.approx(sorted(seconds))
    assert trace.malformed.count == 0


def test_rows_far_out_of_order_are_left_out(tmp_path: Path) -> None:
    """A file of two classes one after the other: no burst is made of the second one, the user is told to sort."""
    path = tmp_path / "trace.csv"
    seconds = list(range(reader.REORDER_ROWS + 500))
    path.write_text(HEADER + "".join(map(lmm_line, [*seconds, 100])))
    trace = open_trace(path)
    assert len(list(trace)) == len(seconds)
    assert trace.malformed.first[0].line_number == len(seconds) + 2
    assert "sort the file by time" in trace.malformed.first[0].reason


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"speed_up": 0.0}, "speed_up 0: a number above 0 is needed"),
        ({"speed_up": float("nan")}, "speed_up nan"),
        ({"duration_s": -1.0}, "duration_s -1"),
        ({"start_s": -1.0}, "start_s -1: 0 or more"),
        ({"image_rate_scale": 1e9}, "image_rate_scale 1e"),
        ({"image_count": "cube"}, "image count 'cube': it is read as sqrt or raw"),
    ],
)
def test_options(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        TraceOptions(**wrong)  # type: ignore[arg-type]
