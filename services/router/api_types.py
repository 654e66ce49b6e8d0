"""The OpenAI chat API at the HTTP edge: pydantic models with a bound on everything, and the request they turn into.

Unknown fields are ignored, null means absent. Fields that would change the answer and are not built yet are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from triptych.shared.errors import BadRequest
from triptych.shared.messages import NO_LIMITS, PixelLimits
from triptych.shared.settings import Settings

MAX_PARTS = 4096  # chosen: parts of one message; images and text have tighter bounds of their own
MAX_NAME_CHARS = 512  # chosen: longer than any model's name
MAX_OUTPUT_TOKENS = 1 << 31  # only to keep numbers sane: the context length is the real bound
MAX_PIXELS = 1 << 31  # as above: the model's own bounds hold
LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's low detail is a picture of 512 x 512
DEFAULT_TEMPERATURE = 1.0  # OpenAI's default

Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Edge(BaseModel):
    """Unknown fields are ignored, null is the same as absent, and "1" is not a number."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(_Edge):
    type: Literal["text"]
    text: str


class ImageUrl(_Edge):
    """detail low: at most LOW_DETAIL_PIXELS. All others: as large as the model takes it."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high", "original"] = "auto"


def _shape_of_url(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~object"


class ImagePart(_Edge):
    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Field(min_length=1), Tag("~text")] | Annotated[ImageUrl, Tag("~object")], Discriminator(_shape_of_url)
    ]

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url

    @property
    def is_low_detail(self) -> bool:
        return isinstance(self.image_url, ImageUrl) and self.image_url.detail == "low"


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}"


Part = Annotated[Annotated[TextPart, Tag("~text")] | Annotated[ImagePart, Tag("~image_url")], Discriminator(_kind_of_part)]


def _shape_of_content(value: Any) -> str:
    return "~string" if isinstance(value, str) else "~parts"


class ChatMessage(_Edge):
    """Content may be absent or null (an assistant's turn that only called tools): it is then empty."""

    role: Role
    content: Annotated[
        Annotated[str, Tag("~string")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("~parts")],
        Discriminator(_shape_of_content),
    ] = ""


class StreamOptions(_Edge):
    include_usage: bool = False


class ProcessorKwargs(_Edge):
    """vLLM's way to say how large the model is to see the pictures; clamped to the model's own bounds."""

    min_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    max_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)

    def limits(self, is_low_detail: bool) -> PixelLimits:
        """Of a picture. Raises BadRequest when they contradict each other."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise BadRequest("min_pixels is larger than max_pixels", param="mm_processor_kwargs")
        wanted = [self.max_pixels] if self.max_pixels is not None else []
        low = [LOW_DETAIL_PIXELS] if is_low_detail else []
        return PixelLimits(self.min_pixels, min(wanted + low, default=None))


class ChatCompletionRequest(_Edge):
    """model may be left out. max_completion_tokens wins over max_tokens. temperature 0 is greedy. ignore_eos keeps
    generating to max_tokens."""

    model: str = Field("", max_length=MAX_NAME_CHARS)
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    temperature: float = Field(DEFAULT_TEMPERATURE, ge=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=MAX_OUTPUT_TOKENS)
    mm_processor_kwargs: ProcessorKwargs = ProcessorKwargs()

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image of a request, in order of appearance; param names it in errors."""

    url: str
    param: str
    limits: PixelLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message: a string, or text parts (str) and images (None) in their order."""

    role: str
    content: str | tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Chat:
    """A valid request, before anything was looked up. model "": whichever is served. max_tokens None: whatever the context
    leaves."""

    model: str
    turns: tuple[ChatTurn, ...]
    images: tuple[ImageInput, ...]
    max_tokens: int | None
    temperature: float
    seed: int
    ignore_eos: bool
    stream: bool
    include_usage: bool


def parse_chat(body: bytes, settings: Settings, max_text_chars: int) -> Chat:
    """The request in an HTTP body.

    Raises:
        BadRequest: it is not JSON, or a field is wrong, out of bounds, or not supported; param is the field's path.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    _refuse_unsupported(data)
    try:
        request = ChatCompletionRequest.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error
    if request.min_tokens and not (request.ignore_eos and request.min_tokens <= (request.output_limit or 0)):
        raise _unsupported("min_tokens", "without ignore_eos and a max_tokens that is not smaller")
    return _to_chat(request, settings, max_text_chars)


def _to_chat(request: ChatCompletionRequest, settings: Settings, max_text_chars: int) -> Chat:
    if len(request.messages) > settings.max_messages:
        raise BadRequest(f"at most {settings.max_messages} messages are allowed", code="too_many_messages", param="messages")
    images: list[ImageInput] = []
    turns: list[ChatTurn] = []
    num_chars = 0
    for i, message in enumerate(request.messages):
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            turns.append(ChatTurn(role, message.content))
            num_chars += len(message.content)
            continue
        parts = [part.text if isinstance(part, TextPart) else None for part in message.content]
        turns.append(ChatTurn(role, tuple(parts)))
        num_chars += sum(len(text) for text in parts if text is not None)
        for j, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                limits = request.mm_processor_kwargs.limits(part.is_low_detail)
                images.append(ImageInput(part.url, f"messages.[{i}].content.[{j}].image_url", limits))
    if len(images) > settings.max_images:
        raise BadRequest(
            f"{len(images)} images in one request; at most {settings.max_images} are allowed",
            code="too_many_images",
            param="messages",
        )
    if num_chars > max_text_chars:
        raise BadRequest(
            f"the messages have {num_chars} characters, far more than fit in the model's context in tokens",
            code="context_length_exceeded",
            param="messages",
        )
    return Chat(
        model=request.model,
        turns=tuple(turns),
        images=tuple(images),
        max_tokens=request.output_limit,
        temperature=request.temperature,
        seed=request.seed if request.seed is not None else secrets.randbits(62),
        ignore_eos=request.ignore_eos,
        stream=request.stream,
        include_usage=request.stream and request.stream_options.include_usage,
    )


def _first_problem(error: ValidationError) -> BadRequest:
    """The first thing that pydantic found, under the field's path. Its inputs are never repeated: they may be huge."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    steps = [f"[{step}]" if isinstance(step, int) else str(step) for step in first["loc"]]
    path = ".".join(step for step in steps if not step.startswith("~"))
    if first["type"] == "union_tag_invalid":
        kind = str(first.get("ctx", {}).get("tag", ""))[1:41]
        message = f"a content part of type {kind} is not supported: use text or image_url"
    else:
        message = first["msg"]
    return BadRequest(f"{path}: {message}", param=path)


# --- fields of later steps ------------------------------------------------------------------------------------------------


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def _has_only(*names: str) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, dict) or value.keys() <= set(names)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type", "text") == "text"


_NOTHING = _is(False, "", [], {})
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {  # each with what makes it harmless; null always is
    "n": _is(1),
    "best_of": _is(1),
    "top_p": _is(1),
    "top_k": _is(0, -1),
    "min_p": _is(0),
    "stop": _is("", []),
    "stop_token_ids": _NOTHING,
    "include_stop_str_in_output": _is(False),
    "bad_words": _NOTHING,
    "allowed_token_ids": _NOTHING,
    "logprobs": _is(False),
    "top_logprobs": _is(0),
    "prompt_logprobs": _is(False),
    "logit_bias": _NOTHING,
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "length_penalty": _is(1),
    "use_beam_search": _is(False),
    "tools": _NOTHING,
    "tool_choice": _is("none", "auto"),
    "functions": _NOTHING,
    "function_call": _is("none", "auto"),
    "response_format": _is_text_format,
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "modalities": _is([], ["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "echo": _is(False),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "chat_template": _NOTHING,
    "chat_template_kwargs": _NOTHING,
    "documents": _NOTHING,
    "mm_processor_kwargs": _has_only("min_pixels", "max_pixels"),
    "media_io_kwargs": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
}


def _refuse_unsupported(data: dict[str, Any]) -> None:
    for name in _UNSUPPORTED.keys() & data.keys():
        value = data[name]
        if value is not None and not _UNSUPPORTED[name](value):
            raise _unsupported(name, "with this value")


def _unsupported(name: str, when: str) -> BadRequest:
    return BadRequest(f"{name} {when} is not supported yet; leave it out", code="unsupported_parameter", param=name)
