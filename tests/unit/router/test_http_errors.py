"""Errors as clients see them: the codes of docs/errors.md and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.services.router.http_errors import error_object, error_response
from triptych.shared.errors import BadRequest, DeadlineExceeded, InstanceLost, InternalError, Overloaded, TriptychError

TABLE = (Path(__file__).resolve().parents[3] / "docs" / "errors.md").read_text()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("x"), 400, None),
        (BadRequest("x", code="invalid_image"), 400, "invalid_image"),
        (BadRequest("x", code="request_timeout", status=408), 408, "request_timeout"),
        (Overloaded("x"), 503, "overloaded"),
        (Overloaded("x", code="stage_unavailable"), 503, "stage_unavailable"),
        (Overloaded("x", code="tensor_store_full"), 503, "overloaded"),
        (Overloaded("x", code="bus_unavailable"), 503, "overloaded"),
        (DeadlineExceeded(), 504, "timeout"),
        (InstanceLost("x", code="tensor_gone"), 503, "instance_lost"),
        (InternalError("x", code="kv_layout"), 500, "internal"),
    ],
)
def test_codes(error: TriptychError, status: int, code: str | None) -> None:
    assert error_object(error)["error"]["code"] == code
    assert error_response(error).status_code == status
    assert str(code or "null") in TABLE
    assert str(status) in TABLE
