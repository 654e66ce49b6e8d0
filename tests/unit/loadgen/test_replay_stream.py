"""AnswerStream: counts, times, usage and endings, however the network cuts the bytes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.replay.stream import MAX_LINE_BYTES, AnswerStream


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


USAGE = {"prompt_tokens": 70, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}
ANSWER = b"".join(
    (
        delta(role="assistant", content=""),
        b": ping\n\n",
        delta(content='a "red", '),
        event(choices=[{"index": 0, "delta": {"content": "data: [DONE]\n\n"}}], usage=None, error=None),
        delta(content=" Kreis \u00e9\u4e2d"),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(choices=[], usage=USAGE),
        b"data: [DONE]\n\n",
    )
)
HOSTILE = (
    b"data: " + b"[" * 50_000 + b"\n\n",
    b'data: {"x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n\n",
    event(choices=[], usage={"prompt_tokens": -1}),
    event(choices=[], usage={"prompt_tokens": 10**400}),
    event(choices=[], usage={"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": -1}}),
)
TEXT = 'a "red", data: [DONE]\n\n Kreis \u00e9\u4e2d'


def read(*pieces: bytes, keeps_text: bool = True) -> AnswerStream:
    """Piece i comes at second i."""
    stream = AnswerStream()
    stream.keeps_text = keeps_text
    for at_s, piece in enumerate(pieces):
        stream.feed(piece, float(at_s))
    return stream


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12), st.booleans())
def test_however_the_bytes_are_cut(cuts: list[int], is_crlf: bool) -> None:
    answer = ANSWER.replace(b"\n", b"\r\n") if is_crlf else ANSWER
    edges = [0, *sorted(cuts), len(answer)]
    stream = read(*(answer[start:end] for start, end in itertools.pairwise(edges)))
    assert (stream.text, stream.num_chunks, stream.is_done, stream.error) == (TEXT, 3, True, None)
    assert (stream.num_prompt_tokens, stream.num_cached_tokens, stream.num_output_tokens) == (70, 64, 3)
    assert len(stream.gaps_s) == 2
    assert stream.first_s is not None
    assert stream.last_s == pytest.approx(stream.first_s + sum(stream.gaps_s))


def test_a_chunk_without_content_is_no_token() -> None:
    stream = read(delta(role="assistant", content=""), delta(content="a") + delta(content="b"), delta(), delta(content="c"))
    assert (stream.first_s, stream.last_s, stream.gaps_s) == (1.0, 3.0, [0.0, 2.0])


def test_thinking_counts() -> None:
    assert read(delta(reasoning_content="hm"), delta(reasoning="so"), delta(content="x")).num_chunks == 3


def test_text_is_kept_only_if_it_is_wanted() -> None:
    stream = read(ANSWER, keeps_text=False)
    assert (stream.num_chunks, stream.texts) == (3, [])


def test_an_error_event() -> None:
    stream = read(delta(content="a"), event(error={"message": "lost", "code": "instance_lost"}))
    assert stream.error == "error_event"
    assert "instance_lost" in stream.told
    assert read(event(error="\x1b[2J red")).told.isprintable()


@pytest.mark.parametrize("depth", range(1, 2000, 37))
def test_an_error_of_any_depth(depth: int) -> None:
    """What was decoded can be told, whatever the stack holds."""
    stream = read(b'data: {"error": ' + b"[" * depth + b"1" + b"]" * depth + b"}\n\n")
    assert stream.error in ("error_event", "broken_stream")
    assert stream.told


@pytest.mark.parametrize(
    "broken", [b"data: {\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n", b"x" * (MAX_LINE_BYTES + 1), *HOSTILE]
)
def test_what_cannot_be_read(broken: bytes) -> None:
    stream = read(delta(content="a"), broken, b"data: [DONE]\n\n")
    assert stream.error == "broken_stream"
    assert stream.num_chunks == 1


def test_the_first_failure_counts_and_none_after_the_end() -> None:
    stream = AnswerStream()
    stream.fail("cancelled", "x")
    stream.fail("timeout", "y")
    assert (stream.error, stream.told) == ("cancelled", "x")
    done = read(ANSWER)
    done.fail("timeout", "no end")
    assert done.error is None
