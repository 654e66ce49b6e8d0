"""Fields of OpenAI's and vLLM's APIs that are not built (yet): refused by name where they would change the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triptych.shared.errors import BadRequest


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def _has_only(*names: str) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, dict) or value.keys() <= set(names)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type", "text") == "text"


_NOTHING = _is(False, "", [], {})
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {  # each with what makes it harmless; null always is
    "best_of": _is(1),
    "include_stop_str_in_output": _is(False),
    "bad_words": _NOTHING,
    "allowed_token_ids": _NOTHING,
    "prompt_logprobs": _is(False),
    "logit_bias": _NOTHING,
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
    "suffix": _is(""),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "chat_template": _NOTHING,
    "chat_template_kwargs": _NOTHING,
    "documents": _NOTHING,
    "mm_processor_kwargs": _has_only("min_pixels", "max_pixels"),
    "media_io_kwargs": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
}


def refuse_unsupported(data: dict[str, Any]) -> None:
    """Raises BadRequest for the first that would change the answer."""
    for name in _UNSUPPORTED.keys() & data.keys():
        value = data[name]
        if value is not None and not _UNSUPPORTED[name](value):
            raise unsupported(name, "with this value")


def unsupported(name: str, when: str) -> BadRequest:
    """The error for a field that is known and not built."""
    return BadRequest(f"{name} {when} is not supported yet; leave it out", code="unsupported_parameter", param=name)
