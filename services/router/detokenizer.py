"""From output tokens to text, piece by piece, without ever cutting a character. One instance per request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHAR_TOKENS = 3  # an unfinished UTF-8 character has at most 3 bytes, and a token at least one


class Detokenizer:
    """`push` gives the text that is certain by now, `finish` the rest; together they are decode(all tokens).

    Text is decoded after the tokens that came out last when needs_context: a tokenizer may decode a token differently at the
    start. One that is byte-level does not, and is asked for a third as much.
    """

    def __init__(self, tokenizer: Tokenizer, needs_context: bool = True) -> None:
        self._tokenizer = tokenizer
        self.needs_context = needs_context
        self._context: list[int] = []
        self._before = ""  # the context's text
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += token_ids
        text = self._decode(self._pending)
        if not text:  # special tokens only
            self._pending = []
            return ""
        if not text.endswith(_REPLACEMENT):
            return self._emit(len(self._pending), text)
        # An unfinished character, or bytes that are none: hold back only what the next token could still complete.
        for cut in range(len(self._pending) - 1, max(0, len(self._pending) - 1 - _MAX_CHAR_TOKENS), -1):
            head, tail = self._pending[:cut], self._pending[cut:]
            head_text = self._decode(head)
            is_settled = not head_text.endswith(_REPLACEMENT) or len(tail) == _MAX_CHAR_TOKENS
            if is_settled and head_text and head_text + self._text(head, tail)[len(self._text(head)) :] == text:
                return self._emit(cut, head_text)
        return ""

    def finish(self) -> str:
        return self._emit(len(self._pending), self._decode(self._pending))

    def _emit(self, count: int, text: str) -> str:
        is_context = self.needs_context or text.endswith(_REPLACEMENT)  # which may go on, and is then no second one
        self._context, self._pending = self._pending[: count if is_context else 0], self._pending[count:]
        self._before = self._text(self._context) if is_context else ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        """Text of token_ids after the context."""
        return self._text(self._context, token_ids)[len(self._before) :]

    def _text(self, *token_ids: list[int]) -> str:
        return str(self._tokenizer.decode([*chain(*token_ids)], skip_special_tokens=True))
