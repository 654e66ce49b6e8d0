"""What decoding somebody else's JSON or TOML may raise: a trace, a server's answer, a results folder."""

from __future__ import annotations

UNDECODABLE = (ValueError, RecursionError)  # msgspec's and Unicode's errors are ValueErrors; [[[[... exhausts the stack
