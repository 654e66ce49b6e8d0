"""Plain completions and tokenizing at the HTTP edge: pydantic models with a bound on everything, and what they turn into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from triptych.services.router.api_types import ChatMessage
from triptych.services.router.edge_model import MAX_NAME_CHARS, EdgeModel, decode_body, validated
from triptych.services.router.sampling_fields import MAX_TOP_LOGPROBS, Generation, SamplingFields, TokenId
from triptych.services.router.unsupported import refuse_unsupported
from triptych.shared.errors import BadRequest

MAX_PROMPTS = 32  # chosen: of one request
MAX_ALL_CHOICES = 64  # chosen: prompts times n
MAX_TOKENS = 1 << 20  # chosen: of one prompt; the context length is the real bound
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for plain completions

TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


def _shape_of_prompt(value: Any) -> str:
    if isinstance(value, str):
        return "~text"
    first = value[0] if isinstance(value, list) and value else None
    return "~texts" if isinstance(first, str) else "~lists" if isinstance(first, list) else "~tokens"


class CompletionRequest(SamplingFields):
    """prompt: a text, its token ids, or several of either. logprobs: how many of the most probable tokens are told."""

    prompt: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[TokenIds, Tag("~tokens")]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("~texts")]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("~lists")],
        Discriminator(_shape_of_prompt),
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """A valid request, before anything was looked up. model "": whichever is served. prompts: each a text or token ids."""

    model: str
    prompts: tuple[str | list[int], ...]
    add_special_tokens: bool
    generation: Generation


def parse_completion(body: bytes, max_text_chars: int) -> Completion:
    """Raises BadRequest as parse_chat does."""
    data = decode_body(body, max_text_chars)
    refuse_unsupported(data)
    request = validated(CompletionRequest, data)
    prompt = request.prompt
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) * request.n > MAX_ALL_CHOICES:
        raise BadRequest(f"prompts times n are at most {MAX_ALL_CHOICES}", param="n")
    if sum(len(one) for one in prompts if isinstance(one, str)) > max_text_chars:
        raise BadRequest("the prompt is far longer than the model's context", code="context_length_exceeded", param="prompt")
    generation = request.generation(request.max_tokens or DEFAULT_MAX_TOKENS, request.logprobs)
    return Completion(request.model, tuple(prompts), request.add_special_tokens, generation)  # type: ignore[arg-type]


class TokenizeRequest(EdgeModel):
    """Either a text or a chat, in vLLM's form."""

    model: str = Field("", max_length=MAX_NAME_CHARS)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(EdgeModel):
    model: str = Field("", max_length=MAX_NAME_CHARS)
    tokens: TokenIds
