"""From chat messages to token ids, exactly as transformers' apply_chat_template(tokenize=True) does, without torch.

Text of a user can never become a special token: where it spells one, that spelling is taken out of the rendered prompt and
tokenized apart, as text. Images are single placeholders here; `expand` gives each its num_tokens. Called in a thread.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from triptych.services.router.api_types import ChatTurn
from triptych.services.router.spellings import Spellings
from triptych.shared.checkpoint import Checkpoint
from triptych.shared.errors import BadRequest, InternalError
from triptych.shared.token_bytes import pack_tokens

_TEMPLATE_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
NUM_KNOWN_FORMS = 64  # chosen: of conversations; one of very many parts takes a megabyte


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids with one placeholder per image, at the indices placeholder_at (ascending)."""

    token_ids: array[int]
    placeholder_at: tuple[int, ...]

    @property
    def num_text_tokens(self) -> int:
        return len(self.token_ids) - len(self.placeholder_at)

    def followed_by(self, token_ids: Sequence[int]) -> Prompt:
        """With output after it, from which generation goes on."""
        return Prompt(self.token_ids + array("I", token_ids), self.placeholder_at) if token_ids else self


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """The unified sequence as uint32, and where each image's placeholders begin."""

    token_ids: array[int]
    offsets: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return pack_tokens(self.token_ids)


def expand(prompt: Prompt, num_tokens: Sequence[int]) -> ExpandedPrompt:
    """Give the i-th image num_tokens[i] placeholders; linear in the result, by pieces."""
    out = array("I")
    offsets = []
    start = 0
    for at, count in zip(prompt.placeholder_at, num_tokens, strict=True):
        out.extend(prompt.token_ids[start:at])
        offsets.append(len(out))
        out.extend(prompt.token_ids[at : at + 1] * count)
        start = at + 1
    out.extend(prompt.token_ids[start:])
    return ExpandedPrompt(out, tuple(offsets))


class PromptBuilder:
    """Tokenizer and chat template of one checkpoint. Thread-safe: two tokenizers, neither changed after start."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
            self._text_tokenizer: Tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
        except Exception as error:  # the binding raises plain Exception
            raise BadRequest("the checkpoint's tokenizer.json cannot be read", code="unsupported_model") from error
        self._text_tokenizer.encode_special_tokens = True
        config = _read_json(checkpoint.path / "tokenizer_config.json")
        self._template = _chat_template(checkpoint.path, config)
        self._variables = {name: _token_text(config[name]) for name in _TEMPLATE_VARIABLES if config.get(name) is not None}
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        spellings = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._image_token_id = checkpoint.image_token_id
        text_config = checkpoint.config.get("text_config", checkpoint.config)
        self._vocab_size = int(text_config.get("vocab_size", self.tokenizer.get_vocab_size()))
        self._num_of_template = lru_cache(NUM_KNOWN_FORMS)(self._count_of_template)

    def build(self, turns: Sequence[ChatTurn], num_images: int) -> Prompt:
        """Render and tokenize.

        Raises:
            BadRequest: the template refuses these messages, or doesn't place every image.
        """
        expected = self._num_of_template(tuple(map(_skeleton, turns)))
        token_ids = self._tokenize(turns, split_parts=False)
        if self._num_special(token_ids) != expected:  # neighbouring pieces of text spell a special token together
            token_ids = self._tokenize(turns, split_parts=True)
            if self._num_special(token_ids) != expected:
                raise BadRequest("the messages cannot be told apart from the chat template's markers", param="messages")
        placeholder_at = tuple(i for i, id_ in enumerate(token_ids) if id_ == self._image_token_id)
        if len(placeholder_at) != num_images:
            raise BadRequest(
                f"the model's chat template places {len(placeholder_at)} of {num_images} images; "
                "put images in messages of the user",
                code="unsupported_image",
                param="messages",
            )
        return Prompt(array("I", token_ids), placeholder_at)

    def plain(self, prompt: str | Sequence[int], add_special_tokens: bool) -> Prompt:
        """A prompt without a template: a text, in which special tokens may be spelled, or token ids.

        Raises:
            BadRequest: it is empty, or has a token that is none or stands for a picture.
        """
        token_ids = self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if max(token_ids) >= self._vocab_size:
            raise BadRequest(f"token ids must be below {self._vocab_size}", param="prompt")
        if self._image_token_id in token_ids:
            raise BadRequest("a plain prompt cannot have pictures; use chat", code="unsupported_image", param="prompt")
        return Prompt(array("I", token_ids), ())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text that may spell special tokens."""
        return _token_ids(self.tokenizer, text, add_special_tokens)

    def _tokenize(self, turns: Sequence[ChatTurn], split_parts: bool) -> list[int]:
        """Split at spellings of special tokens inside the users' text (and around each text when split_parts)."""
        spellings = Spellings(self._spelling, split_parts)
        rendered = self._render([spellings.marked(turn) for turn in turns])
        token_ids: list[int] = []
        for i, piece in enumerate(spellings.split(rendered)):
            token_ids += self._encode_text(piece) if i % 2 else self._encode_plain(piece)
        return token_ids

    def _count_of_template(self, skeletons: tuple[ChatTurn, ...]) -> int:
        """Special tokens that are the template's own in a conversation of this form."""
        return self._num_special(self._encode_plain(self._render(skeletons)))

    def _render(self, turns: Sequence[ChatTurn]) -> str:
        messages = [{"role": turn.role, "content": _template_content(turn)} for turn in turns]
        variables: dict[str, Any] = self._variables
        try:
            rendered = render_jinja_template(
                conversations=[messages], chat_template=self._template, add_generation_prompt=True, **variables
            )[0]
        except jinja2.TemplateSyntaxError as error:
            raise InternalError("the checkpoint's chat template is broken") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest("the model's chat template does not take these messages", param="messages") from error
        return str(rendered[0])

    def _encode_plain(self, text: str) -> list[int]:
        return _token_ids(self.tokenizer, text) if text else []

    def _encode_text(self, text: str) -> list[int]:
        return _token_ids(self._text_tokenizer, text) if text else []

    def _num_special(self, token_ids: list[int]) -> int:
        return sum(id_ in self._special_ids for id_ in token_ids)


def _token_ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Not by `encode`, which holds the interpreter lock all the time: the event loop would stand still for 1 s per MB."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _skeleton(turn: ChatTurn) -> ChatTurn:
    """The same turn with harmless text: its prompt has exactly the special tokens that are the template's own."""
    if isinstance(turn.content, str):
        return ChatTurn(turn.role, "x" if turn.content else "")
    return ChatTurn(turn.role, tuple(part and "x" for part in turn.content))


def _template_content(turn: ChatTurn) -> str | list[dict[str, str]]:
    if isinstance(turn.content, str):
        return turn.content
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in turn.content]


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    """Where transformers looks: chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    if not isinstance(template, str):
        raise BadRequest("the checkpoint has no chat template", code="unsupported_model")
    return template


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(file: Path) -> dict[str, Any]:
    loaded = json.loads(file.read_bytes()) if file.exists() else {}
    return loaded if isinstance(loaded, dict) else {}
