"""One choice's output at the router: from tokens to pieces of text, stop strings found, probabilities in step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.services.router.stop_strings import StopStrings
from triptych.services.router.token_streams import Tokens
from triptych.services.router.token_texts import TokenTexts
from triptych.shared.messages import FinishReason
from triptych.shared.sampling_params import TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputToken:
    """An output token and its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. tokens: those not told of yet, when log probabilities were asked for."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[OutputToken, ...] = ()


class Output:
    """stop: strings that end it; text of the first min_tokens tokens is not searched. num_tokens: output tokens up to now."""

    def __init__(self, index: int, texts: TokenTexts, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._index = index
        self._detokenizer = texts.detokenizer()
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._can_stop = bool(stop)
        self._untold: list[OutputToken] = []
        self.num_tokens = 0

    def push(self, tokens: Tokens) -> Piece:
        """What is certain now; its text may be empty. After a piece with finish_reason nothing may come."""
        before = self.num_tokens
        text = self._search(tokens.token_ids) if self._can_stop else self._take(tokens.token_ids)
        self._untold += map(OutputToken, tokens.token_ids[: self.num_tokens - before], tokens.logprobs)
        finish_reason = tokens.finish_reason
        if finish_reason is not None and not self._stops.is_met:
            text += self._stops.push(self._detokenizer.finish())
            text += self._stops.finish()
        if self._stops.is_met:
            finish_reason = "stop"
        if not text and finish_reason is None:
            return Piece(self._index, "")
        untold, self._untold = tuple(self._untold), []
        return Piece(self._index, text, finish_reason, untold)

    def _take(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def _search(self, token_ids: Sequence[int]) -> str:
        """One by one: how many tokens were needed must not depend on how they came."""
        found = ""
        for token_id in token_ids:
            text = self._take((token_id,))
            found += text if self.num_tokens <= self._min_tokens else self._stops.push(text)
            if self._stops.is_met:
                break
        return found
