"""Under which conditions a replay ran: what was asked for, and what was found out before and after. The report reads it.

Written to the results folder as conditions.json at the begin and at the end; a later run can take its isolated latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from triptych.loadgen.replay.outcome import RequestOutcome
from triptych.loadgen.replay.slo import Isolated, Limits, Slo, class_wide, own_scaled

CONDITIONS_FILE = "conditions.json"
OUTCOMES_FILE = "outcomes.jsonl"  # one RequestOutcome a line, in the order in which they ended
OptionValue = str | int | float | bool | list[str] | None
Ended = Literal["running", "complete", "interrupted", "target_died", "target_unreachable", "trace_empty", "results_broken"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """label: real, or what else the target says that it is (emulated). versions: of this tool, its libraries and the server.
    started_at: UTC, ISO 8601. options: the command's, by name, as given or by default. tokens_per_word: as the target counts
    prompts; None where the trace's lengths are not asked for. slos, isolated: by class. warm_up_s: requests that were scheduled
    before it are warm-up. notes: what a reader has to know, each a sentence. error_examples: by kind, what the server or the
    connection said first. ended, message: how it went; message is for the user, empty when all was sent."""

    target: str
    model: str
    label: str
    versions: Mapping[str, str]
    started_at: str
    trace: str
    trace_form: str
    seed: int
    options: Mapping[str, OptionValue]
    tokens_per_word: float | None = None
    slos: Mapping[str, Slo] = field(default_factory=dict)
    isolated: Mapping[str, Isolated] = field(default_factory=dict)
    warm_up_s: float = 0.0
    notes: tuple[str, ...] = ()
    num_malformed_rows: int = 0
    malformed_rows: tuple[str, ...] = ()  # the first few, with their line numbers
    error_examples: Mapping[str, str] = field(default_factory=dict)
    ended: Ended = "running"
    message: str = ""

    def class_wide_limits(self, outcome: RequestOutcome) -> Limits | None:
        """None where the class has no SLO."""
        name = outcome.request_class
        return class_wide(self.slos[name], self.isolated.get(name)) if name in self.slos else None

    def own_scaled_limits(self, outcome: RequestOutcome) -> Limits | None:
        """None where the class has no SLO, or the request's isolated latency is unknown."""
        name = outcome.request_class
        return own_scaled(self.slos[name], self.isolated.get(name), outcome.num_prompt_tokens) if name in self.slos else None


def write_conditions(conditions: Conditions, folder: Path) -> None:
    """To the results folder, whole or not at all."""
    new = folder / f"{CONDITIONS_FILE}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(conditions), indent=2))
    new.replace(folder / CONDITIONS_FILE)


def read_conditions(folder: Path) -> Conditions:
    """Of an earlier run. Raises OSError, or one of UNDECODABLE."""
    return msgspec.json.decode((folder / CONDITIONS_FILE).read_bytes(), type=Conditions)
