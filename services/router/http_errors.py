"""Errors as clients see them: OpenAI's error object under the status of docs/errors.md. Texts are fixed, no internals."""

from __future__ import annotations

import math
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from triptych.shared.errors import BadRequest, InstanceLost, InternalError, Overloaded, TriptychError

MAX_RETRY_AFTER_S = 5  # chosen: the SDKs obey up to 120 s, but overload here passes in seconds
_STATUS_TEXT = {
    404: ("there is no such path; the API is at /v1/chat/completions and /v1/models", "not_found"),
    405: ("this path does not take this method", "method_not_allowed"),
}

_log = structlog.get_logger(__name__)


def error_object(error: TriptychError) -> dict[str, Any]:
    """The body, also of an error inside a stream."""
    is_clients = isinstance(error, BadRequest)
    return {
        "error": {
            "message": error.message,
            "type": "invalid_request_error" if is_clients else "server_error",
            "param": error.param,
            "code": _public_code(error),
        }
    }


def _public_code(error: TriptychError) -> str | None:
    """One of docs/errors.md. Between processes there are more (kv_full, tensor_gone, ...), which tell a client nothing."""
    if isinstance(error, BadRequest):
        return None if error.code == "invalid_request" else error.code
    if isinstance(error, Overloaded):
        return error.code if error.code in ("stage_unavailable", "timeout") else "overloaded"
    return "instance_lost" if isinstance(error, InstanceLost) else "internal"


def error_response(error: TriptychError) -> JSONResponse:
    """Nothing was sent yet: status and headers tell clients whether to try again."""
    headers = {}
    if error.status == 500:
        headers["x-should-retry"] = "false"
    if error.status in (429, 503):
        headers["Retry-After"] = str(min(MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s or 1))))
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


def as_typed(error: Exception) -> TriptychError:
    """The error to answer with; a bug is logged here, once."""
    if isinstance(error, TriptychError):
        return error
    _log.error("request failed by a bug", exc_info=error)
    return InternalError()


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text, code = _STATUS_TEXT.get(status, ("the request cannot be served", f"http_{status}"))
    if status >= 500:
        return error_response(InternalError())
    response = error_response(BadRequest(text, code=code, status=status))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _on_exception(request: Request, error: Exception) -> JSONResponse:
    return error_response(as_typed(error))


def install_error_handlers(app: FastAPI) -> None:
    """Every answer that isn't an endpoint's own is an OpenAI error too."""
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(TriptychError, _on_exception)
    app.add_exception_handler(Exception, _on_exception)
