"""Base of the pydantic models at the HTTP edge, and how a body becomes one: what is wrong is told under the field's path."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from triptych.shared.errors import BadRequest

MAX_NAME_CHARS = 512  # chosen: longer than any model's name
MIN_MARKS, TEXT_CHARS_PER_MARK = 1 << 18, 8  # chosen: a picture is one string; text that fits in the context has fewer
PIECE_BYTES = 1 << 20  # measured: 10 ms at most to count in


class EdgeModel(BaseModel):
    """Unknown fields are ignored, null is the same as absent, and "1" is not a number."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


E = TypeVar("E", bound=EdgeModel)


def decode_body(body: bytes, max_text_chars: int) -> dict[str, Any]:
    """The JSON object in an HTTP body, of a request whose text has at most so many characters.

    Raises:
        BadRequest: it is none; or it has so many values that it takes long to read and much memory: a value of two bytes
            takes 60, and other threads, the event loop's above all, wait while it is made.
    """
    if _has_more_marks(body, MIN_MARKS + max_text_chars // TEXT_CHARS_PER_MARK):
        raise BadRequest("the body has too many JSON values", code="too_many_values", status=413)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return data


def _has_more_marks(body: bytes, limit: int) -> bool:
    """Whether there are more than `limit` characters that begin or separate values, those in strings included."""
    num_marks = 0
    for start in range(0, len(body), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        num_marks += sum(map(piece.count, (b",", b"[", b"{")))
        if num_marks > limit:
            return True
    return False


def validated(model: type[E], data: dict[str, Any]) -> E:
    """Raises BadRequest for the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> BadRequest:
    """Its inputs are never repeated: they may be huge."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    steps = [f"[{step}]" if isinstance(step, int) else str(step) for step in first["loc"]]
    path = ".".join(step for step in steps if not step.startswith("~"))
    if first["type"] == "union_tag_invalid":
        kind = str(first.get("ctx", {}).get("tag", ""))[1:41]
        message = f"a content part of type {kind} is not supported: use text or image_url"
    else:
        message = first["msg"]
    return BadRequest(f"{path}: {message}", param=path)
