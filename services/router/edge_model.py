"""Base of the pydantic models at the HTTP edge, and how a body becomes one: what is wrong is told under the field's path."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from triptych.shared.errors import BadRequest

MAX_NAME_CHARS = 512  # chosen: longer than any model's name


class EdgeModel(BaseModel):
    """Unknown fields are ignored, null is the same as absent, and "1" is not a number."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


E = TypeVar("E", bound=EdgeModel)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object in an HTTP body.

    Raises:
        BadRequest: it is none.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the body is not valid JSON", code="invalid_json") from error
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return data


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
