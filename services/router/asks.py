"""From an HTTP body to what is to be generated, for each of the two APIs. Takes CPU time: called in a worker thread."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.services.router.api_types import parse_chat
from triptych.services.router.completion_types import parse_completion
from triptych.services.router.data_url import ImageSource, read_source
from triptych.services.router.prompt import Prompt, PromptBuilder
from triptych.services.router.sampling_fields import Generation
from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings

MIN_TEXT_CHARS, CHARS_PER_TOKEN = 1 << 16, 64  # chosen: no real text has longer tokens on average


@dataclass(frozen=True, slots=True)
class Model:
    """What a router serves."""

    name: str
    prompts: PromptBuilder

    def check(self, name: str) -> None:
        """Raises BadRequest when a client wants another one; "" is any."""
        if name not in ("", self.name):
            raise BadRequest(
                f"there is no model {name} here; the model is {self.name}", code="model_not_found", status=404, param="model"
            )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must stay within. max_model_len: prompt and output tokens."""

    settings: Settings
    max_model_len: int

    @property
    def max_text_chars(self) -> int:
        """More characters cannot fit in the context as tokens."""
        return max(MIN_TEXT_CHARS, CHARS_PER_TOKEN * self.max_model_len)


@dataclass(frozen=True, slots=True)
class Ask:
    """prompts: each gets generation.num_choices outputs. sources: the pictures of the only prompt. param: the prompts' field,
    for errors."""

    prompts: tuple[Prompt, ...]
    sources: tuple[ImageSource, ...]
    generation: Generation
    param: str


def read_chat(body: bytes, model: Model, bounds: Bounds) -> Ask:
    """Raises BadRequest."""
    chat = parse_chat(body, bounds.settings, bounds.max_text_chars)
    model.check(chat.model)
    prompt = model.prompts.build(chat.turns, len(chat.images))
    sources = tuple(read_source(image, bounds.settings.max_media_bytes) for image in chat.images)
    return Ask((prompt,), sources, chat.generation, "messages")


def read_completion(body: bytes, model: Model, bounds: Bounds) -> Ask:
    """Raises BadRequest."""
    completion = parse_completion(body, bounds.max_text_chars)
    model.check(completion.model)
    prompts = tuple(model.prompts.plain(prompt, completion.add_special_tokens) for prompt in completion.prompts)
    return Ask(prompts, (), completion.generation, "prompt")
