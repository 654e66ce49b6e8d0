"""The scaler's decision log as people read it: what was done, why, by which figures, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape

from triptych.shared.decision_entry import DecisionEntry, DecisionList, Look

STYLES = {"done": "green", "failed": "red", "refused": "red", "advised": "yellow", "pending": "dim"}
MEANING = {
    "off": "the scaler decides nothing about roles and instances: elastic is off",
    "advise": "the scaler only tells what it would do: elastic is advise",
    "on": "the scaler does what it decides",
}


def print_decisions(told: DecisionList, console: Console) -> None:
    """Oldest first, so that the last one stands where people look."""
    for entry in told.decisions:
        for line in _lines(entry):
            console.print(line, highlight=False, soft_wrap=True)
    shown = f"{len(told.decisions)} of {told.num_decisions} decisions" if told.num_decisions else "no decisions yet"
    console.print(f"policy {told.policy}, {shown}; {MEANING.get(told.elastic, told.elastic)}", highlight=False)


def _lines(entry: DecisionEntry) -> Iterator[str]:
    time_of_day = entry.at.partition("T")[2][:8]
    result = f"[{STYLES[entry.result]}]{entry.result}[/]"
    took = f" in {1000 * entry.took_s:.0f} ms" if entry.result == "done" else ""
    detail = f" ({escape(entry.detail)})" if entry.detail else ""
    yield f"[bold]{time_of_day}  {entry.action} {escape(entry.target)} -> {escape(entry.to)}[/]  {result}{took}{detail}"
    yield f"          {escape(entry.reason)}"
    if entry.terms:
        yield f"          {', '.join(f'{name} {_figure(value)}' for name, value in entry.terms.items())}"
    yield f"          before: {_look(entry.before)}"
    for outcome in entry.outcomes:
        yield f"          {outcome.after_s:.0f} s later: {_look(outcome.look)}"


def _figure(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"


def _look(look: Look) -> str:
    """What a decision should have changed."""
    parts = [f"in time {_shares(look.attainment)}"] if look.attainment else []
    parts += [f"waiting {_counts(look.num_waiting)}", f"running {_counts(look.num_running)}"]
    parts += [f"KV free {look.free_kv:.0%}", f"instances {_counts(look.instances)}"]
    return "; ".join(parts)


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
