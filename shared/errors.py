"""Every error that a request can end in, in four kinds by what the caller should do about it.

`BadRequest` is never retried, `Overloaded` may be retried elsewhere or later, `InstanceLost` means that the request must be
attempted again, `InternalError` is our bug. They cross the bus as `WireError`; the router turns them into HTTP answers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

UNREACHABLE = "unreachable"  # code of an InstanceLost whose request never got to the instance: it did no harm there
GIVEN_UP = "given_up"  # code of an InstanceLost: the role was taken away, and its time to end is over
CACHE_MISS = "cache_miss"  # code of an InstanceLost that asked for something only because the cache index said it was held
ErrorKind = Literal["bad_request", "overloaded", "instance_lost", "internal"]


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels in a message. `message` is safe to show to a client: no address, path or repr in it."""

    kind: ErrorKind
    code: str
    message: str
    status: int
    param: str | None = None
    retry_after_s: float | None = None


class TriptychError(Exception):
    """Base of all typed errors.

    Args:
        message: what went wrong and what to do, safe to show to a client.
        code: stable and machine-readable; clients see those of the table in docs/errors.md.
        status: HTTP status that the router answers with when nothing was streamed yet.
        param: path of the offending field, such as `messages.[0].content.[1].image_url`.
        retry_after_s: seconds after which the same request may succeed.
    """

    kind: ErrorKind = "internal"

    def __init__(
        self, message: str, *, code: str, status: int, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> WireError:
        return WireError(self.kind, self.code, self.message, self.status, self.param, self.retry_after_s)


class BadRequest(TriptychError):
    """The client must change the request (4xx)."""

    kind: ErrorKind = "bad_request"

    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400, param: str | None = None) -> None:
        super().__init__(message, code=code, status=status, param=param)


class Overloaded(TriptychError):
    """A bound was hit, a stage is absent or draining, or the deadline passed: try elsewhere or later (503, 504)."""

    kind: ErrorKind = "overloaded"

    def __init__(self, message: str, *, code: str = "overloaded", status: int = 503, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, code=code, status=status, retry_after_s=retry_after_s)


class InstanceLost(TriptychError):
    """An instance died (default code), or no longer holds what was asked of it: the request must be attempted again."""

    kind: ErrorKind = "instance_lost"

    def __init__(self, message: str, *, instance_id: str = "", code: str = "instance_lost") -> None:
        super().__init__(message, code=code, status=503, retry_after_s=1.0)
        self.instance_id = instance_id


class InternalError(TriptychError):
    """Our bug, or a request that breaks whatever it touches (500, not to be retried)."""

    kind: ErrorKind = "internal"

    def __init__(self, message: str = "internal error", *, code: str = "internal") -> None:
        super().__init__(message, code=code, status=500)


class DeadlineExceeded(Overloaded):
    """The request's time ran out before its first token (504)."""

    def __init__(self, message: str = "the request's time ran out before its first token") -> None:
        super().__init__(message, code="timeout", status=504, retry_after_s=None)


def from_wire(error: WireError) -> TriptychError:
    """The exception that `error` was made from."""
    if error.kind == "bad_request":
        return BadRequest(error.message, code=error.code, status=error.status, param=error.param)
    if error.kind == "overloaded":
        if error.code == "timeout":
            return DeadlineExceeded(error.message)
        return Overloaded(error.message, code=error.code, status=error.status, retry_after_s=error.retry_after_s)
    if error.kind == "instance_lost":
        return InstanceLost(error.message, code=error.code)
    return InternalError(error.message, code=error.code)
