"""The fields of a request that say how its output is made, the same in chat and in plain completions, each with its bounds."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Discriminator, Field, Tag

from triptych.services.router.edge_model import MAX_NAME_CHARS, EdgeModel
from triptych.shared.errors import BadRequest
from triptych.shared.sampling_params import SamplingParams

MAX_OUTPUT_TOKENS = 1 << 31  # only to keep numbers sane: the context length is the real bound
MAX_TOKEN_ID = 1 << 31  # as above
MAX_CHOICES = 8  # chosen: of one prompt; each is computed by itself
MAX_STOPS = 4  # OpenAI's
MAX_STOP_CHARS = 256  # chosen
MAX_STOP_TOKENS = 64  # chosen
MAX_TOP_LOGPROBS = 20  # OpenAI's
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_SALT_CHARS = 128  # chosen: longer than any digest in hex
MAX_SLO_MS = 3_600_000.0  # chosen: an hour

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]


def _shape_of_stop(value: Any) -> str:
    return "~string" if isinstance(value, str) else "~list"


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a request is served. cache_salt: what is cached is shared with requests of the same one only. slo_ttft_s:
    from its arrival until its first token is due; None: as the settings have it."""

    cache_salt: bytes = b""
    slo_ttft_s: float | None = None


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Generation:
    """How the outputs of a request are made. sampling.max_tokens 0: what the context leaves; its stop_token_ids are the
    client's own. Choice i of a prompt is sampled with seed + i."""

    sampling: SamplingParams
    ignore_eos: bool
    stop: tuple[str, ...]
    num_choices: int
    stream: bool
    include_usage: bool
    terms: Terms = NO_TERMS

    def params(self, index: int, eos_token_ids: tuple[int, ...]) -> SamplingParams:
        """Of the index-th choice of a prompt, for a model with these ends of its own."""
        own = () if self.ignore_eos else eos_token_ids
        stop_token_ids = tuple(dict.fromkeys(self.sampling.stop_token_ids + own))
        seed = (self.sampling.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
        return msgspec.structs.replace(self.sampling, stop_token_ids=stop_token_ids, seed=seed)


class StreamOptions(EdgeModel):
    include_usage: bool = False


class SamplingFields(EdgeModel):
    """model may be left out. temperature 0 is greedy. top_k 0 and -1 mean all tokens. ignore_eos keeps generating past the
    model's own end, to max_tokens. cache_salt and slo_ttft_ms: see Terms."""

    model: str = Field("", max_length=MAX_NAME_CHARS)
    max_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_OUTPUT_TOKENS)
    temperature: float = Field(DEFAULT_TEMPERATURE, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, le=MAX_TOKEN_ID)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        Annotated[str, Field(max_length=MAX_STOP_CHARS), Tag("~string")]
        | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("~list")],
        Discriminator(_shape_of_stop),
    ] = ""
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS, pattern=r"^[A-Za-z0-9_.-]*$")
    slo_ttft_ms: float | None = Field(None, ge=1, le=MAX_SLO_MS, allow_inf_nan=False)

    def generation(self, max_tokens: int | None, num_logprobs: int | None) -> Generation:
        """max_tokens and num_logprobs have other names or forms in each API.

        Raises:
            BadRequest: min_tokens is more than max_tokens.
        """
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise BadRequest("min_tokens is larger than max_tokens", param="min_tokens")
        stop = ((self.stop,) if self.stop else ()) if isinstance(self.stop, str) else tuple(self.stop)
        sampling = SamplingParams(
            max_tokens=max_tokens or 0,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            num_logprobs=num_logprobs,
        )
        include_usage = self.stream and self.stream_options.include_usage
        slo_ttft_s = self.slo_ttft_ms / 1000 if self.slo_ttft_ms is not None else None
        terms = Terms(self.cache_salt.encode(), slo_ttft_s)
        return Generation(sampling, self.ignore_eos, stop, self.n, self.stream, include_usage, terms)
