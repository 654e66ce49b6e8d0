"""What tokens stand for. Single ones: their bytes, which need not be whole characters; used for log probabilities."""

from __future__ import annotations

import re

import msgspec
from tokenizers import Tokenizer

from triptych.services.router.detokenizer import Detokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others are the characters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """Of one tokenizer, byte-level (GPT-2, Qwen, Llama 3) or with SentencePiece's marks. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fields: dict[int, bytes] = {}  # at most the vocabulary
        self._added = {id_: token.content.encode() for id_, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = b"{}" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._alphabet = _byte_level_alphabet() if b"ByteLevel" in decoder else None
        self._is_byte_level_only = msgspec.json.decode(decoder).get("type") == "ByteLevel"

    def detokenizer(self) -> Detokenizer:
        """For a new output."""
        return Detokenizer(self._tokenizer, needs_context=not self._is_byte_level_only)

    def bytes_of(self, token_id: int) -> bytes:
        """Nothing for an id without a token: models have room for some."""
        if (added := self._added.get(token_id)) is not None:
            return added
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[char] for char in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match.group(1), 16)])
        return piece.replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Of a token by itself, which may be a part of a character."""
        return self.bytes_of(token_id).decode(errors="replace")

    def fields_of(self, token_id: int) -> bytes:
        """Its text and bytes as fields of a JSON object. Kept: the same few thousand are asked for again and again."""
        if (fields := self._fields.get(token_id)) is None:
            fields = msgspec.json.encode({"token": self.text_of(token_id), "bytes": list(self.bytes_of(token_id))})[1:-1]
            self._fields[token_id] = fields
        return fields
