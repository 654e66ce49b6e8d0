"""Reads a streamed answer as its bytes arrive: when content came, how much, the usage, how it ended.

On the path of every chunk, thousands a second: only the few fields that count are decoded.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from triptych.loadgen.undecodable import UNDECODABLE
from triptych.shared.units import plain

MAX_LINE_BYTES = 1 << 20  # chosen: no event of an answer is as long
MAX_TOLD_CHARS = 300  # of an error's text
MAX_TOKENS = 1 << 40  # of a usage; chosen: no number that a figure could not be made of
_DONE = b"[DONE]"
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class AnswerStream:
    """One answer. `feed` takes what arrived; error is a kind of RequestOutcome's, and told is what was said about it.
    keeps_text: whether texts fills up."""

    __slots__ = (
        "_rest",
        "error",
        "first_s",
        "gaps_s",
        "is_done",
        "keeps_text",
        "last_s",
        "num_cached_tokens",
        "num_chunks",
        "num_output_tokens",
        "num_prompt_tokens",
        "texts",
        "told",
    )

    def __init__(self) -> None:
        self.keeps_text = False
        self._rest = b""
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.gaps_s: list[float] = []
        self.num_chunks = 0
        self.texts: list[str] = []
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.is_done = False
        self.error: str | None = None
        self.told = ""

    def feed(self, data: bytes, now_s: float) -> None:
        """Any bytes of the stream, in order, and when they came."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:], now_s)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
            self.fail("broken_stream", "an event of over 1 MB")

    def fail(self, error: str, told: str) -> None:
        """The first failure counts, and none after the end."""
        if self.error is None and not self.is_done:
            self.error, self.told = error, plain(told[:MAX_TOLD_CHARS])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def _read(self, payload: bytes, now_s: float) -> None:
        if len(payload) < 16 and payload.strip() == _DONE:
            self.is_done = True
            return
        try:
            chunk = _decode_chunk(payload)
        except UNDECODABLE as error:
            self.fail("broken_stream", f"an event that cannot be read: {error}")
            return
        if chunk.error:
            self.fail("error_event", msgspec.json.encode(chunk.error).decode())
        for choice in chunk.choices:
            if (delta := choice.delta) is not None and (text := delta.content or delta.reasoning_content or delta.reasoning):
                self._count(text, now_s)
        if chunk.usage is not None:
            self._read_usage(chunk.usage)

    def _count(self, text: str, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.num_chunks += 1
        if self.keeps_text:
            self.texts.append(text)

    def _read_usage(self, usage: _Usage) -> None:
        self.num_prompt_tokens, self.num_output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
