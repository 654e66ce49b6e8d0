"""The bodies of OpenAI's two text APIs: one JSON object, or the events of a stream. No I/O; one instance per answer.

Most events are pieces of text that differ in nothing else: they are put together from ready bytes. So are log probabilities,
of which an answer may have a million: as objects they would take a hundred times the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from triptych.services.router.output import OutputToken, Piece
from triptych.services.router.record import RequestRecord, StageStamp
from triptych.services.router.token_texts import TokenTexts

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Bodies(ABC):
    """What the two APIs share. created: Unix seconds. with_usage: a stream will end with its usage, so every other event says
    null. A choice's finish_reason comes in an event of its own, after its text."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    no_text: ClassVar[bytes]

    def __init__(self, answer_id: str, created: int, model: str, texts: TokenTexts, with_usage: bool) -> None:
        self._fields = {"id": answer_id, "created": created, "model": model}
        self._texts = texts
        self._head = b"data: " + _encode({"object": self.chunk_kind, **self._fields})[:-1] + b',"choices":[{"index":'
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """The answer as one JSON object; a piece is all of a choice. With log probabilities it may take seconds."""
        choices = [
            {
                "index": piece.index,
                **self._whole_text(piece.text),
                "logprobs": self._logprobs(piece) if piece.tokens else None,
                "finish_reason": piece.finish_reason,
            }
            for piece in pieces
        ]
        return _encode({"object": self.kind, **self._fields, "choices": choices, "usage": usage, **extra})

    def opening(self, index: int) -> bytes:
        """The event before a choice's first piece, if there is one."""
        return b""

    def events(self, piece: Piece, trace: dict[str, Any] | None = None) -> bytes:
        """Nothing for a piece without news. trace: goes with the finish_reason."""
        data = b""
        if piece.text or piece.tokens:
            logprobs = _encode(self._logprobs(piece)) if piece.tokens else b"null"
            data = self._event(piece.index, self._text(piece.text), logprobs)
        if piece.finish_reason is not None:
            extra = b"" if trace is None else b',"triptych":' + _encode(trace)
            data += self._event(piece.index, self.no_text, b"null", _encode(piece.finish_reason), extra)
        return data

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event before [DONE] when the client asked for usage."""
        return b"data: " + _encode({"object": self.chunk_kind, **self._fields, "choices": [], "usage": usage}) + b"\n\n"

    def _event(self, index: int, text: bytes, logprobs: bytes, finish_reason: bytes = b"null", extra: bytes = b"") -> bytes:
        body = b'%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (index, text, logprobs, finish_reason, extra)
        return self._head + body + self._tail

    @abstractmethod
    def _text(self, text: str) -> bytes: ...

    @abstractmethod
    def _whole_text(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, piece: Piece) -> dict[str, Any] | msgspec.Raw: ...


class ChatBodies(Bodies):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    no_text = b'"delta":{}'

    def opening(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":""}', b"null")

    def _text(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % _encode(text)

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, piece: Piece) -> msgspec.Raw:
        tokens = b",".join(map(self._output_token, piece.tokens))
        return msgspec.Raw(b'{"content":[%b],"refusal":null}' % tokens)

    def _output_token(self, token: OutputToken) -> bytes:
        top = b",".join(b"{%b}" % self._token(token_id, logprob) for token_id, logprob in token.logprobs.top)
        return b'{%b,"top_logprobs":[%b]}' % (self._token(token.token_id, token.logprobs.logprob), top)

    def _token(self, token_id: int, logprob: float) -> bytes:
        return b'%b,"logprob":%b' % (self._texts.fields_of(token_id), _encode(logprob))


class CompletionBodies(Bodies):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    no_text = b'"text":""'

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_chars: dict[int, int] = {}

    def _text(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        """The token itself is among its top_logprobs, as OpenAI has it, unless no top was asked for."""
        tokens = [self._token_text(token.token_id) for token in piece.tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars.get(piece.index, 0))
            self._num_chars[piece.index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [token.logprobs.logprob for token in piece.tokens],
            "top_logprobs": [msgspec.Raw(_encode(self._top(token))) for token in piece.tokens],
            "text_offset": offsets,
        }

    def _top(self, token: OutputToken) -> dict[str, float] | None:
        if not token.logprobs.top:
            return None
        top = {self._token_text(token_id): logprob for token_id, logprob in reversed(token.logprobs.top)}
        return {**top, self._token_text(token.token_id): token.logprobs.logprob}

    def _token_text(self, token_id: int) -> str:
        return self._texts.text_of(token_id)


def usage_of(records: Sequence[RequestRecord], num_choices: int) -> dict[str, Any]:
    """Tokens counted as the model saw them, images expanded; records: of all choices, num_choices for each prompt."""
    prompts = records[::num_choices]
    num_text = sum(record.num_text_tokens for record in prompts)
    num_image = sum(record.num_image_tokens for record in prompts)
    num_output = sum(record.num_output_tokens for record in records)
    return {
        "prompt_tokens": num_text + num_image,
        "completion_tokens": num_output,
        "total_tokens": num_text + num_image + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(record.num_cached_tokens for record in prompts),
            "text_tokens": num_text,
            "image_tokens": num_image,
        },
    }


def trace_of(record: RequestRecord) -> dict[str, Any]:
    """The request's way through the stages (of the attempt that counted), for X-Triptych-Trace."""
    return {"attempts": len(record.attempts), "stages": [_stage(stamp) for stamp in record.stamps()]}


def _stage(stamp: StageStamp) -> dict[str, Any]:
    time = stamp.time
    return {
        "stage": stamp.stage,
        "instance_id": stamp.instance_id,
        "reason": stamp.reason,
        "queued_ms": round(time.queued_s * 1000, 3) if time else 0.0,
        "transfer_ms": round(time.transfer_s * 1000, 3) if time else 0.0,
        "compute_ms": round(time.compute_s * 1000, 3) if time else 0.0,
    }
