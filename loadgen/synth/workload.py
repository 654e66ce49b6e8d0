"""A workload: several clients, what each asks and when. Read from any TOML file, or from loadgen/workloads by name."""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.loadgen.synth.published import COUNTS, RATES, SIZES
from triptych.loadgen.synth.tables import MAX_SIZE, Counts, Sizes
from triptych.loadgen.traces.trace import TraceError
from triptych.loadgen.undecodable import UNDECODABLE

SUFFIX = ".toml"
MAX_CLIENTS = 16  # the names of prefix blocks have 4 bits for the client
DAY_S = 86400.0

# No file asks for more than a computer can send, or for NaN, which no bound lets pass. All chosen
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Period = Annotated[float, Meta(ge=0.1, le=1e9)]  # seconds that something lasts
Rate = Annotated[float, Meta(gt=0, le=1e5)]
Factor = Annotated[float, Meta(ge=0, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_SIZE)]


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """While it lasts the client's rate, and the number of pictures of its requests, are multiplied."""

    start_s: Seconds
    duration_s: Seconds
    rate: Factor = 1.0
    images: Factor = 1.0


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The client's rate counts conversations then, its text_tokens each message, its pictures come with the first one.

    turns, think_s: percentiles. system_tokens: what the prompts of all its conversations begin with.
    """

    turns: dict[float, float]
    think_s: dict[float, float]
    system_tokens: Tokens = 0
    max_context_tokens: Tokens = 16384  # chosen; a conversation that would be longer ends


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes are percentiles, such as {5 = 40, 50 = 200, 99 = 900}, or the name of published ones (synth/published.py).

    context_tokens: text and pictures together; or text_tokens, with image_tokens for each picture. images: count -> weight;
    none: text only. context_follows_images: correlation, 0 to 1. cv: of the gaps, which are gamma distributed; 1: Poisson.
    hours: published rates of hours and days. swing: variance of a level that multiplies the rate and lasts swing_s in the mean.
    surge: 0 to 1, the share of what decides about the number of pictures that is common to all requests for surge_s.
    image_reuse: the share of requests with pictures that have those of an earlier one.
    """

    name: str
    rate_per_s: Rate
    output_tokens: dict[float, float] | str
    context_tokens: dict[float, float] | str | None = None
    text_tokens: dict[float, float] | str | None = None
    image_tokens: dict[float, float] | str | None = None
    images: dict[int, float] | str | None = None
    context_follows_images: Share = 0.0
    cv: Factor = 1.0
    hours: str | None = None
    swing: Factor = 0.0
    swing_s: Period = 60.0
    surge: Share = 0.0
    surge_s: Period = 3600.0
    image_reuse: Share = 0.0
    conversation: Conversation | None = None
    burst: tuple[Burst, ...] = ()

    def __post_init__(self) -> None:
        if (self.context_tokens is None) == (self.text_tokens is None):
            raise ValueError(f"client {self.name}: either context_tokens or text_tokens")
        if (self.image_tokens is not None) != (self.images is not None and self.text_tokens is not None):
            raise ValueError(f"client {self.name}: image_tokens go with images and text_tokens")
        if self.image_reuse and self.image_tokens is None:
            raise ValueError(f"client {self.name}: image_reuse goes with image_tokens")
        if self.conversation and self.text_tokens is None:
            raise ValueError(f"client {self.name}: a conversation has text_tokens")
        if self.conversation:
            Sizes(self.conversation.turns)
            Sizes(self.conversation.think_s)
        if self.hours is not None and self.hours not in RATES:
            raise ValueError(f"client {self.name}: hours {self.hours!r} is not one of {', '.join(RATES)}")
        for sizes in (self.output_tokens, self.context_tokens, self.text_tokens, self.image_tokens):
            if sizes is not None:
                sizes_of(sizes)
        if self.images is not None:
            counts_of(self.images)

    @property
    def requests_per_s(self) -> float:
        return self.rate_per_s * (Sizes(self.conversation.turns).mean if self.conversation else 1.0)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """day_s: how long a day takes, below 86400 the day passes quicker. start_hour: UTC, for clients that have hours.

    published: the trace whose percentiles `loadgen synth` compares with.
    """

    about: str
    duration_s: Period
    client: tuple[Client, ...]
    seed: int = 0
    day_s: Period = DAY_S
    start_hour: Annotated[int, Meta(ge=0, lt=168)] = 0
    published: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.client) <= MAX_CLIENTS or len({client.name for client in self.client}) != len(self.client):
            raise ValueError(f"1 to {MAX_CLIENTS} clients with names of their own are needed")


def sizes_of(given: dict[float, float] | str) -> Sizes:
    if isinstance(given, str) and given not in SIZES:
        raise ValueError(f"sizes {given!r} are not one of {', '.join(SIZES)}")
    return Sizes(SIZES[given] if isinstance(given, str) else given)


def counts_of(given: dict[int, float] | str) -> Counts:
    if isinstance(given, str) and given not in COUNTS:
        raise ValueError(f"counts {given!r} are not one of {', '.join(COUNTS)}")
    return Counts(COUNTS[given] if isinstance(given, str) else given)


@cache
def workload_names() -> tuple[str, ...]:
    files = resources.files("triptych.loadgen.workloads").iterdir()
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX)))


def load_workload(path_or_name: str | Path) -> Workload:
    """Raises TraceError, whose text is for the user."""
    name = str(path_or_name)
    file: Traversable = Path(path_or_name)
    if name in workload_names():
        file = resources.files("triptych.loadgen.workloads") / (name + SUFFIX)
    try:
        return msgspec.toml.decode(file.read_bytes(), type=Workload, strict=False)
    except FileNotFoundError:
        raise TraceError(f"{name}: no such file, and no workload: those are {', '.join(workload_names())}") from None
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror}") from None
    except UNDECODABLE as error:
        raise TraceError(f"{name}: {error}") from None
