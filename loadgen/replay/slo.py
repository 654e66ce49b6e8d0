"""SLOs per class, absolute or as a factor of the isolated latency: what a request takes when nothing else is there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

CLASSES = ("text", "image")
PARTS = ("ttft", "tbt")  # in the order of Slo's
FORM = "text:ttft=2s,tbt=100ms or image:ttft=5x (times the isolated latency); of both classes without a name"
_BOUND = re.compile(r"(?P<part>ttft|tbt)=(?P<value>\d+(?:\.\d+)?|\.\d+)(?P<unit>ms|s|x|)")


@dataclass(frozen=True, slots=True)
class Bound:
    """At most so many seconds, or, with is_factor, so many times the isolated latency."""

    value: float
    is_factor: bool = False


@dataclass(frozen=True, slots=True)
class Slo:
    """What one class of requests is promised; None: nothing. tbt bounds a request's mean time between tokens."""

    ttft: Bound | None = None
    tbt: Bound | None = None

    @property
    def needs_isolated(self) -> bool:
        return any(bound is not None and bound.is_factor for bound in (self.ttft, self.tbt))


@dataclass(frozen=True, slots=True)
class Limits:
    """An SLO in seconds; None: no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyLine:
    """base_s + s_per_token * tokens of the prompt: how an isolated latency grows with a request's size."""

    base_s: float
    s_per_token: float

    def at(self, num_prompt_tokens: int) -> float:
        return self.base_s + self.s_per_token * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Isolated:
    """Latencies of num_requests of one class, sent one at a time: medians, and lines through all. tbt: None where no answer
    had two tokens."""

    num_requests: int
    ttft_s: float
    ttft_line: LatencyLine
    tbt_s: float | None = None
    tbt_line: LatencyLine | None = None


def class_wide(slo: Slo, isolated: Isolated | None) -> Limits:
    """One limit for the whole class: factors are of the class's median."""
    ttft_s, tbt_s = (None, None) if isolated is None else (isolated.ttft_s, isolated.tbt_s)
    return Limits(_limit(slo.ttft, ttft_s), _limit(slo.tbt, tbt_s))


def own_scaled(slo: Slo, isolated: Isolated | None, num_prompt_tokens: int) -> Limits | None:
    """Limits by the request's own size: factors are of what its size takes alone; an absolute limit is the median request's,
    scaled alike. None where isolated latencies or the size are unknown."""
    if isolated is None or not num_prompt_tokens:
        return None
    ttft_s = isolated.ttft_line.at(num_prompt_tokens)
    tbt_s = None if isolated.tbt_line is None else isolated.tbt_line.at(num_prompt_tokens)
    return Limits(_scaled(slo.ttft, isolated.ttft_s, ttft_s), _scaled(slo.tbt, isolated.tbt_s, tbt_s))


def parse_slos(texts: Iterable[str]) -> dict[str, Slo]:
    """By class, of texts such as `image:ttft=5x,tbt=100ms`; one without a class is of both, and gives way to one of the class.

    Raises:
        ValueError: one is no SLO, or bounds the same twice.
    """
    bounds: dict[tuple[str, str], Bound] = {}  # by class, where one is named, and part
    for text in texts:
        name, _, listed = text.rpartition(":")
        if name not in ("", *CLASSES):
            raise ValueError(f"{name!r} is no class of requests; the form is {FORM}")
        for part, bound in map(_parse_bound, listed.split(",")):
            if bounds.setdefault((name, part), bound) is not bound:
                raise ValueError(f"{part} of {name or 'both classes'} is bounded twice; the form is {FORM}")
    of_classes = {name: [bounds.get((name, part), bounds.get(("", part))) for part in PARTS] for name in CLASSES}
    return {name: Slo(*found) for name, found in of_classes.items() if any(found)}


def _parse_bound(text: str) -> tuple[str, Bound]:
    match = _BOUND.fullmatch(text.strip())
    if match is None or not 0 < float(match["value"]) < math.inf:
        raise ValueError(f"{text!r} is no bound; the form is {FORM}")
    return match["part"], Bound(float(match["value"]) / (1000 if match["unit"] == "ms" else 1), match["unit"] == "x")


def _limit(bound: Bound | None, isolated_s: float | None) -> float | None:
    if bound is None or (bound.is_factor and isolated_s is None):
        return None
    return bound.value * (isolated_s or 0.0) if bound.is_factor else bound.value


def _scaled(bound: Bound | None, median_s: float | None, own_s: float | None) -> float | None:
    if bound is None or own_s is None or not median_s:
        return None
    return bound.value * own_s if bound.is_factor else bound.value * own_s / median_s
