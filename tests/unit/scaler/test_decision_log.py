"""The log of decisions: bounded, in words, with outcomes at their time."""

from __future__ import annotations

import math
from functools import partial

from triptych.services.scaler.decision_log import DecisionLog, described
from triptych.shared.decision_entry import Look
from triptych.shared.messages import InstanceId
from triptych.shared.policies.elastic.actions import Advise, Decision, Drain, Launch, Switch, Wanted

SWITCH = Switch(InstanceId("decode-1-ab"), frozenset(("decode", "prefill")), "multimodal")


def look(num_waiting: int) -> Look:
    return Look({"decode": 1}, {"prefill": num_waiting}, {}, 0.5)


def test_actions_in_words() -> None:
    assert described(SWITCH) == ("switch", "decode-1-ab", "prefill+decode multimodal")
    assert described(Launch("text", "", 2)) == ("launch", "text", "2 more")
    assert described(Drain(InstanceId("text-0-ab"))) == ("drain", "text-0-ab", "leave")
    assert described(Advise((Wanted("text", "text", 3), Wanted("encoder", "", 1)))) == (
        "advise",
        "cluster",
        "3 text text, 1 encoder",
    )


def test_an_entry_from_decision_to_outcome() -> None:
    log = DecisionLog(outcomes_after_s=(10.0, 60.0))
    number = log.add(
        Decision(SWITCH, "prefill is short", {"gain": 2.0, "bt_text": math.inf}), look(9), 100.0, "2026-01-01T00:00:00"
    )
    [entry] = log.latest(10)
    assert (entry.number, entry.result, entry.reason, entry.terms) == (
        number,
        "pending",
        "prefill is short",
        {"gain": 2.0, "bt_text": None},
    )
    log.finish(number, "done", took_s=0.02)
    log.observe(109.0, lambda: look(8))
    assert log.latest(10)[0].outcomes == ()
    for now_s, num_waiting in ((111.0, 3), (112.0, 2), (161.0, 1), (500.0, 7)):
        log.observe(now_s, partial(look, num_waiting))
    [entry] = log.latest(10)
    assert (entry.result, entry.took_s) == ("done", 0.02)
    assert [(outcome.after_s, outcome.look.num_waiting["prefill"]) for outcome in entry.outcomes] == [(11.0, 3), (61.0, 1)]


def test_it_forgets_the_oldest_and_what_is_done_about_them() -> None:
    log = DecisionLog(capacity=2)
    for index in range(3):
        log.add(Decision(Launch("text"), str(index)), look(0), float(index), "")
    log.finish(1, "failed", "too late")
    assert [(entry.number, entry.result) for entry in log.latest(10)] == [(2, "pending"), (3, "pending")]
    assert [entry.number for entry in log.latest(1)] == [3]
    assert log.num_decisions == 3
