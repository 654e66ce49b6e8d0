"""Engine calls whose failure stays with the one item that caused it. Runs on the engine thread; called by the roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from triptych.shared.engine.api import Chunk, Engine
from triptych.shared.errors import InternalError, TriptychError

T = TypeVar("T")
R = TypeVar("R")

_log = structlog.get_logger(__name__)


def each_alone(call: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> list[R | Exception]:
    """call(items), or when that raises, call([item]) for each: its result or its exception."""
    try:
        return list(call(items))
    except Exception as error:
        if len(items) <= 1:
            return [error] * len(items)
        return [each_alone(call, [item])[0] for item in items]


def run_isolated(engine: Engine, chunks: Sequence[Chunk]) -> list[int | Exception | None]:
    """engine.run(chunks); a chunk that breaks the batch fails alone. Chunks are repeatable: their KV goes where it went."""

    def run(batch: Sequence[Chunk]) -> list[int | None]:
        before = [chunk.sequence.num_computed_tokens for chunk in batch]
        try:
            return engine.run(batch)
        except Exception:
            for chunk, num_computed_tokens in zip(batch, before, strict=True):
                chunk.sequence.num_computed_tokens = num_computed_tokens
            raise

    return each_alone(run, chunks) if chunks else []


def as_typed(error: Exception, what: str) -> TriptychError:
    """The error to answer with: `error` itself when typed, else an InternalError without its text; that is logged."""
    if isinstance(error, TriptychError):
        return error
    _log.error("engine call failed", what=what, exc_info=error)
    return InternalError(f"{what} failed")
