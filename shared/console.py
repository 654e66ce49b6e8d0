"""Where commands print their tables: on a terminal as wide as it is, else as wide as the widest table."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 200  # columns; chosen


def table_console() -> Console:
    """Of stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
