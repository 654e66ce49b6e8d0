"""Outcomes and conditions of replays that never were."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from triptych.loadgen.replay.conditions import OUTCOMES_FILE, Conditions, write_conditions
from triptych.loadgen.replay.outcome import RequestOutcome

CONDITIONS = Conditions(
    target="http://127.0.0.1:8000",
    model="some-model",
    label="real",
    versions={"triptych": "1.2.3", "python": "3.11.9"},
    started_at="2026-01-01T00:00:00Z",
    trace="some-trace.csv",
    trace_form="azure-lmm",
    seed=7,
    options={"speed_up": 2.0, "limit": None, "image_count": "sqrt"},
    ended="complete",
)


def answered(
    at_s: float, ttft_s: float, gaps_s: Sequence[float] = (), num_images: int = 0, num_prompt_tokens: int = 100
) -> RequestOutcome:
    """Asked and sent at at_s, answered with a token, and another one after each gap."""
    first_token_s = at_s + ttft_s
    last_token_s = list(itertools.accumulate(gaps_s, initial=first_token_s))[-1]
    return RequestOutcome(
        index=0,
        request_class="image" if num_images else "text",
        num_images=num_images,
        scheduled_s=at_s,
        sent_s=at_s,
        end_s=last_token_s,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        token_gaps_s=tuple(gaps_s),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=len(gaps_s) + 1,
    )


def failed(at_s: float, error: str, num_images: int = 0, after_s: float = 1.0) -> RequestOutcome:
    """Asked at at_s, ended without a token."""
    request_class = "image" if num_images else "text"
    return RequestOutcome(0, request_class, num_images, at_s, at_s, at_s + after_s, error=error)


def write_results(folder: Path, outcomes: Iterable[RequestOutcome], conditions: Conditions = CONDITIONS) -> Path:
    """A results folder as a replay leaves it. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_conditions(conditions, folder)
    lines = b"".join(msgspec.json.encode(outcome) + b"\n" for outcome in outcomes)
    (folder / OUTCOMES_FILE).write_bytes(lines)
    return folder
