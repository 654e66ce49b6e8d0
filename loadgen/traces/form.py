"""A form that traces are published in: how it is recognised, how one record becomes a row. The forms' modules make these."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from triptych.loadgen.traces.row import TraceRow
from triptych.loadgen.traces.trace import TraceOptions

MAX_SESSIONS = 100_000  # chosen: tens of megabytes; a conversation that was silent for longer begins anew

Record = TypeVar("Record")
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Form(Generic[Record]):
    """keys: the columns of a header, or the keys of a JSON object, that every file of this form has.

    converter: called once a file, as some forms remember conversations; the row's arrival_s is the trace's own clock.
    """

    name: str
    keys: tuple[str, ...]
    record: type[Record]
    converter: Callable[[TraceOptions], Callable[[Record], TraceRow]]

    def parser(self, options: TraceOptions) -> Callable[[Mapping[str, Any]], TraceRow]:
        """One file's records to rows; one that is none raises ValueError or msgspec.ValidationError, worded for the user."""
        to_row = self.converter(options)
        return lambda fields: to_row(msgspec.convert(fields, self.record, strict=False))


class SessionStates(OrderedDict[str, State]):
    """What is remembered of each conversation; the one that was silent longest is forgotten first."""

    def remember(self, session: str, state: State) -> None:
        self[session] = state
        self.move_to_end(session)
        if len(self) > MAX_SESSIONS:
            self.popitem(last=False)


def epoch_s(time: datetime) -> float:
    """A time without a zone is UTC, as the Azure traces say."""
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
