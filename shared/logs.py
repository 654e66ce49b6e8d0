"""Logs of a process: structlog and the standard library's loggers in one form, on stderr. JSON when nobody reads along."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

from triptych.shared.settings import Settings

NOISY_LOGGERS = ("httpx", "httpcore", "asyncio", "uvicorn", "nats")  # chosen: their info level tells of every request


def configure_logs(settings: Settings, name: str, stream: TextIO | None = None) -> None:
    """Set up structlog and logging for this process. name is on every line. stream: default stderr."""
    stream = stream or sys.stderr
    is_json = settings.log_json or not stream.isatty()
    level = getattr(logging, settings.log_level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True) if is_json else structlog.processors.TimeStamper(fmt="%H:%M:%S"),
        _add_process_name(name),
    ]
    last: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if is_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # tests configure more than once
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def _add_process_name(name: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("process", name)
        return event

    return add
