"""The OpenAI chat API at the HTTP edge: pydantic models with a bound on everything, and the request they turn into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from triptych.services.router.edge_model import EdgeModel, decode_body, validated
from triptych.services.router.sampling_fields import MAX_OUTPUT_TOKENS, MAX_TOP_LOGPROBS, Generation, SamplingFields
from triptych.services.router.unsupported import refuse_unsupported
from triptych.shared.errors import BadRequest
from triptych.shared.image_info import NO_LIMITS, PixelLimits
from triptych.shared.settings import Settings

MAX_PARTS = 4096  # chosen: parts of one message; images and text have tighter bounds of their own
MAX_PIXELS = 1 << 31  # only to keep numbers sane: the model's own bounds hold
LOW_DETAIL_PIXELS = 512 * 512  # OpenAI's low detail is a picture of 512 x 512

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(EdgeModel):
    type: Literal["text"]
    text: str


class ImageUrl(EdgeModel):
    """detail low: at most LOW_DETAIL_PIXELS. All others: as large as the model takes it."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high", "original"] = "auto"


def _shape_of_url(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~object"


class ImagePart(EdgeModel):
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


class ChatMessage(EdgeModel):
    """Content may be absent or null (an assistant's turn that only called tools): it is then empty."""

    role: Role
    content: Annotated[
        Annotated[str, Tag("~string")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("~parts")],
        Discriminator(_shape_of_content),
    ] = ""


class ProcessorKwargs(EdgeModel):
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


class ChatCompletionRequest(SamplingFields):
    """max_completion_tokens wins over max_tokens. logprobs tells each output token's probability, and top_logprobs those of
    the most probable ones."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_OUTPUT_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    mm_processor_kwargs: ProcessorKwargs = ProcessorKwargs()

    def chat_generation(self) -> Generation:
        """Raises BadRequest when fields contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.generation(limit, self.top_logprobs if self.logprobs else None)


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
    """A valid request, before anything was looked up. model "": whichever is served."""

    model: str
    turns: tuple[ChatTurn, ...]
    images: tuple[ImageInput, ...]
    generation: Generation


def parse_chat(body: bytes, settings: Settings, max_text_chars: int) -> Chat:
    """The request in an HTTP body.

    Raises:
        BadRequest: it is not JSON, or a field is wrong, out of bounds, or not supported; param is the field's path.
    """
    data = decode_body(body, max_text_chars)
    refuse_unsupported(data)
    request = validated(ChatCompletionRequest, data)
    turns, images = read_messages(request.messages, request.mm_processor_kwargs, settings, max_text_chars)
    return Chat(request.model, turns, images, request.chat_generation())


def read_messages(
    messages: list[ChatMessage], kwargs: ProcessorKwargs, settings: Settings, max_text_chars: int
) -> tuple[tuple[ChatTurn, ...], tuple[ImageInput, ...]]:
    """Turns and images in their order. Raises BadRequest when there are too many, or too much text."""
    if len(messages) > settings.max_messages:
        raise BadRequest(f"at most {settings.max_messages} messages are allowed", code="too_many_messages", param="messages")
    images: list[ImageInput] = []
    turns: list[ChatTurn] = []
    num_chars = 0
    for i, message in enumerate(messages):
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
                limits = kwargs.limits(part.is_low_detail)
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
    return tuple(turns), tuple(images)
