"""What the user of `loadgen replay` chose, checked and in types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from triptych.loadgen.replay.conditions import OptionValue
from triptych.loadgen.replay.open_loop import SendOptions
from triptych.loadgen.replay.pictures import PictureOptions
from triptych.loadgen.replay.slo import Isolated, Slo
from triptych.shared.units import plain

ContentName = Literal["trace", "world"]
HEADER = re.compile(r"\s*[\w!#$%&'*+.^`|~-]+\s*:.*", re.ASCII | re.DOTALL)  # a token (RFC 9110, 5.6.2) and a value
SECRET_OPTIONS = ("header",)  # their values stay out of the results


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """target: without /v1. out: the results folder. is_natural: answers end where the model ends them. num_isolated: requests
    of each class that are measured alone, where an SLO is a factor; isolated: such measurements of an earlier run, by class.
    as_given: all options by name, for the results."""

    target: str
    out: Path
    model: str | None = None
    content: ContentName = "trace"
    is_natural: bool = False
    pictures: PictureOptions = field(default_factory=PictureOptions)
    send: SendOptions = field(default_factory=SendOptions)
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    slos: Mapping[str, Slo] = field(default_factory=dict)
    num_isolated: int = 8
    isolated: Mapping[str, Isolated] = field(default_factory=dict)
    as_given: Mapping[str, OptionValue] = field(default_factory=dict)

    @property
    def unmeasured_classes(self) -> list[str]:
        """Those whose isolated latency an SLO needs and no earlier run gave."""
        return [name for name, slo in self.slos.items() if slo.needs_isolated and name not in self.isolated]


def parse_headers(texts: Iterable[str]) -> dict[str, str]:
    """Of `Name: value`; names as `X-Name`, so that one replaces ours. Raises ValueError, which never shows a value."""
    headers = {}
    for text in texts:
        name, _, value = text.partition(":")
        if not (HEADER.fullmatch(text) and value.strip().isprintable()):
            raise ValueError("a header has the form 'Name: value'")
        headers[name.strip().title()] = value.strip()
    return headers


def shown_options(parameters: Mapping[str, object]) -> dict[str, OptionValue]:
    """A command's parameters as the results keep them: files may have names that no JSON can hold."""
    shown: dict[str, OptionValue] = {}
    for name, value in parameters.items():
        if name in SECRET_OPTIONS:
            shown[name] = [plain(str(text).partition(":")[0]) for text in value] if isinstance(value, list | tuple) else None
        elif value is None or isinstance(value, int | float | bool):
            shown[name] = value
        elif isinstance(value, list | tuple):
            shown[name] = [plain(str(item)) for item in value]
        else:
            shown[name] = plain(str(value))
    return shown
