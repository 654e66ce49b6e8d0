"""Where commands print: tables on stdout, on a terminal as wide as it is, else as wide as the widest one; progress on stderr.

Whoever reads may go away, as `| head` does: what is left to say is then dropped, and the command does its work to its end.
"""

from __future__ import annotations

import os

from rich.console import Console

PLAIN_WIDTH = 200  # columns; chosen


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process. Others write to the same descriptor, and Python flushes it when it ends."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def table_console() -> Console:
    """Of stdout."""
    console = _Console()
    return console if console.is_terminal else _Console(width=PLAIN_WIDTH)


def progress_console() -> Console:
    """Of stderr."""
    return _Console(stderr=True)
