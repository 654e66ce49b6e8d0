"""What one replayed request came to. The sender makes these, the report reads them."""

from __future__ import annotations

from dataclasses import dataclass

CANCELLED, UNFINISHED = "cancelled", "unfinished"  # the client went away, as --cancel-rate says; the replay ended before
NO_SOCKET = "no_socket"  # this machine had none left
LEFT_OUT = (CANCELLED, UNFINISHED)  # neither answered nor failed


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Times in seconds after the start of the replay; latencies count from scheduled_s, when the user asked, not from sent_s.

    first_token_s, last_token_s: of the first and last chunk with content; None if none came. token_gaps_s: between chunks with
    content, in order (one chunk may hold several tokens: num_output_tokens counts tokens). num_prompt_tokens,
    num_cached_tokens, num_output_tokens: as the server's usage says; 0 where it says nothing. num_forced_tokens: of output that
    the server was told to make; 0: as many as it likes. error: None, or a short kind: "http_429", "timeout", "connection",
    "no_socket", "broken_stream", "error_event", or one of LEFT_OUT. is_right: whether the answer is the known one; None where
    none is known or the output was forced.
    """

    index: int
    request_class: str
    num_images: int
    scheduled_s: float
    sent_s: float
    end_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_gaps_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_forced_tokens: int = 0
    error: str | None = None
    is_right: bool | None = None
    is_warm_up: bool = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.scheduled_s

    @property
    def mean_tbt_s(self) -> float | None:
        """Decode time over all tokens but the first. None: the answer came in one piece, if at all."""
        if self.first_token_s is None or self.last_token_s is None or not self.token_gaps_s:
            return None
        num_tokens = max(self.num_output_tokens, len(self.token_gaps_s) + 1)
        return (self.last_token_s - self.first_token_s) / (num_tokens - 1)

    @property
    def send_lag_s(self) -> float:
        return self.sent_s - self.scheduled_s
