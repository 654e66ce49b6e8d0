"""The decision log on a terminal: what, why, by which figures, and what came of it."""

from __future__ import annotations

import io

from rich.console import Console

from triptych.services.decision_view import print_decisions
from triptych.shared.decision_entry import DecisionEntry, DecisionList, Look, Outcome

BEFORE = Look(
    {"decode": 3, "prefill multimodal": 1}, {"prefill": 14, "decode": 0}, {"decode": 40}, 0.25, attainment={"text": 0.91}
)
AFTER = Look({"decode": 2, "text": 1}, {"prefill": 2}, {"decode": 38}, 0.2, attainment={"text": 0.985, "multimodal": 1.0})
ENTRY = DecisionEntry(
    number=7,
    at="2026-01-02T03:04:05.678+00:00",
    action="switch",
    target="decode-1-ab",
    to="prefill+decode",
    reason="prefill is short: [gains] 3.2 for 0.4",
    terms={"gain": 3.21987, "cost": 0.4, "bt_text": None},
    before=BEFORE,
    result="done",
    took_s=0.0123,
    outcomes=(Outcome(10.5, AFTER),),
)


def shown(told: DecisionList) -> list[str]:
    out = io.StringIO()
    print_decisions(told, Console(file=out, width=200))
    return out.getvalue().splitlines()


def test_an_entry_and_what_came_of_it() -> None:
    assert shown(DecisionList("triptych", "on", 7, (ENTRY,))) == [
        "03:04:05  switch decode-1-ab -> prefill+decode  done in 12 ms",
        "          prefill is short: [gains] 3.2 for 0.4",
        "          gain 3.22, cost 0.4, bt_text infinite",
        "          before: in time text 91.0%; waiting 14 prefill; running 40 decode; KV free 25%; "
        "instances 3 decode, 1 prefill multimodal",
        "          10 s later: in time text 98.5%, multimodal 100.0%; waiting 2 prefill; running 38 decode; KV free 20%; "
        "instances 2 decode, 1 text",
        "policy triptych, 1 of 7 decisions; the scaler does what it decides",
    ]


def test_nothing_decided_and_nothing_to_be_decided() -> None:
    assert shown(DecisionList("static", "off", 0, ())) == [
        "policy static, no decisions yet; the scaler decides nothing about roles and instances: elastic is off"
    ]
