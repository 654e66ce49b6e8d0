"""Special tokens that users' text spells: marks stand in their place while the template is rendered. Used by prompt.py."""

from __future__ import annotations

import re
import secrets

from triptych.services.router.api_types import ChatTurn

_CLOSE = "\ue0f1"


class Spellings:
    """Of one prompt. A mark is in private-use characters, with a number nobody can guess.

    Args:
        spelling: finds special tokens in text.
        split_parts: every text begins and ends with a mark (of nothing), so that no two can spell a token together.
    """

    def __init__(self, spelling: re.Pattern[str], split_parts: bool) -> None:
        self._spelling = spelling
        self._split_parts = split_parts
        self._spelled: list[str] = []
        self._open = ""

    def marked(self, turn: ChatTurn) -> ChatTurn:
        """The turn with a mark for each spelling."""
        if isinstance(turn.content, str):
            return ChatTurn(turn.role, self._text(turn.content))
        return ChatTurn(turn.role, tuple(None if part is None else self._text(part) for part in turn.content))

    def split(self, rendered: str) -> list[str]:
        """The rendered prompt in pieces; every other one, from the second on, is what a mark stood for."""
        if not self._spelled:
            return [rendered]
        first, *others = rendered.split(self._open)
        pieces = [first]
        for other in others:
            number, close, after = other.partition(_CLOSE)
            if close and number.isdecimal():
                pieces += (self._spelled[int(number)], after)
            else:  # a template that cuts texts has cut the mark
                pieces[-1] += self._open + other
        return pieces

    def _text(self, text: str) -> str:
        marked = self._spelling.sub(lambda match: self._mark(match.group()), text)
        return self._mark("") + marked + self._mark("") if self._split_parts and text else marked

    def _mark(self, spelled: str) -> str:
        self._open = self._open or f"\ue0f0{secrets.token_hex(8)}."
        self._spelled.append(spelled)
        return f"{self._open}{len(self._spelled) - 1}{_CLOSE}"
