"""The cluster as the scaler knows it: from heartbeats, and from what it asked for that does not show yet."""

from __future__ import annotations

from typing import Any

from triptych.services.scaler.cluster_state import ClusterState, kind_of
from triptych.shared.instance_info import Demand, Resources, StageLoad
from triptych.shared.messages import Heartbeat, InstanceId, Role
from triptych.shared.policies.elastic.demand_meter import DemandMeter

HELD = Resources(1, 1, num_blocks=10, num_free_blocks=3, num_cached_blocks=2)
PREFILL, DECODE = frozenset[Role](("prefill",)), frozenset[Role](("decode",))


def beat(name: str, *roles: Role, life: str = "a", **more: Any) -> Heartbeat:
    fields = {"service": "instance", "state": "ready", "loads": (), "resources": HELD, **more}
    return Heartbeat(InstanceId(f"{name}-{life}"), name, roles=roles, http_url="", interval_s=1.0, host="h", **fields)


def router(num_requests: int, num_images: int, life: str = "a") -> Heartbeat:
    demand = {"text": Demand(num_requests, 10 * num_requests), "multimodal": Demand(1, 0, num_images)}
    return beat("router-0", life=life, service="router", demand=demand)


ALL = (beat("encoder-0", "encoder"), beat("prefill-0", "prefill"), beat("decode-0", "decode"), beat("decode-1", "decode"))


def state(time_scale: float = 1.0) -> ClusterState:
    return ClusterState(DemandMeter(0.0), block_size=16, time_scale=time_scale)


def test_kinds() -> None:
    assert kind_of(("decode", "prefill")) == "text"
    assert kind_of(("encoder", "decode")) == "decode+encoder", "it has no name"


def test_an_instance_in_figures_of_the_policys_clock() -> None:
    made = state(time_scale=10.0)
    load = StageLoad("decode", 1, 2, 30, tokens_per_s=500.0)
    made.observe([beat("decode-0", "decode", loads=(load,), group="text")], 5.0)
    [instance] = made.instances
    assert (instance.roles, instance.group, instance.is_ready, instance.since_s) == (DECODE, "text", True, 5.0)
    assert (instance.num_slots, instance.num_free_slots) == (160, 80)
    assert instance.load("decode") == StageLoad("decode", 1, 2, 30, tokens_per_s=50.0)


def test_complete_once_every_role_is_there_and_nobody_starts() -> None:
    made = state()
    made.observe([*ALL[:3], beat("decode-1", state="starting")], 1.0)
    assert not made.is_complete
    made.observe(ALL[:2], 2.0)
    assert not made.is_complete
    made.observe(ALL, 3.0)
    assert made.is_complete
    made.observe(ALL[:2], 4.0)
    assert made.is_complete, "an instance that is lost later is for the policy to see"


def test_roles_are_had_since_they_were_first_seen() -> None:
    made = state()
    made.observe(ALL, 1.0)
    made.observe([*ALL[:3], beat("decode-1", "prefill")], 7.0)
    made.observe([*ALL[:3], beat("decode-1", "prefill")], 9.0)
    assert {one.instance_id: one.since_s for one in made.instances}["decode-1-a"] == 7.0
    assert {one.instance_id: one.since_s for one in made.instances}["decode-0-a"] == 1.0


def test_a_switching_instance_counts_as_what_it_will_be() -> None:
    made = state()
    made.observe(ALL, 1.0)
    made.begin_switch(InstanceId("decode-1-a"), PREFILL, "text")
    made.observe(ALL, 2.0)
    assert made.counts() == {("encoder", ""): 1, ("prefill", ""): 1, ("decode", ""): 1, ("prefill", "text"): 1}
    assert [one.is_ready for one in made.instances] == [True, True, True, False]
    assert made.alone_in(InstanceId("decode-0-a")) == DECODE, "the other one leaves it"
    made.end_switch(InstanceId("decode-1-a"))
    made.observe(ALL, 3.0)
    assert made.counts()["decode", ""] == 2
    assert not made.alone_in(InstanceId("decode-0-a"))
    assert made.alone_in(InstanceId("prefill-0-a"), DECODE) == PREFILL
    assert not made.alone_in(InstanceId("prefill-0-a"), PREFILL | DECODE)


def test_what_was_launched_counts_until_it_is_ready_or_too_late() -> None:
    made = state()
    made.observe(ALL, 1.0)
    made.expect("decode-2", "decode", "", 1.0, 10.0)
    made.expect("text-0", "text", "text", 1.0, 10.0)
    made.observe([*ALL, beat("decode-2", state="starting")], 2.0)
    assert (made.counts()["decode", ""], made.counts()["text", "text"]) == (3, 1)
    assert [one.is_ready for one in made.instances][-2:] == [False, False]
    made.observe([*ALL, beat("decode-2", "decode")], 3.0)
    assert made.counts()["decode", ""] == 3
    assert made.counts()["text", "text"] == 1
    made.observe([*ALL, beat("decode-2", "decode")], 12.0)
    assert made.counts()["text", "text"] == 0, "it did not come"


def test_paid_are_those_that_start_and_those_that_leave_until_they_are_gone() -> None:
    made = state()
    made.observe(ALL, 1.0)
    made.expect("text-0", "text", "text", 1.0, 100.0)
    made.dismiss(made.instances[2], 1.0, 100.0)
    made.observe(ALL, 2.0)
    assert made.paid() == {"encoder": 1, "prefill": 1, "decode": 2, "text": 1}
    assert made.counts()["decode", ""] == 1
    made.observe([*ALL[:2], beat("decode-0", state="draining"), ALL[3], beat("text-0", state="starting")], 3.0)
    assert made.paid() == {"encoder": 1, "prefill": 1, "decode": 2, "text": 1}, "it finishes what it has"
    made.observe([*ALL[:2], ALL[3], beat("text-0", "prefill", "decode", group="text")], 4.0)
    assert made.paid() == {"encoder": 1, "prefill": 1, "decode": 1, "text": 1}
    made.observe([*ALL[:2], beat("decode-1", "decode", state="failing")], 5.0)
    assert made.paid() == {"encoder": 1, "prefill": 1, "decode": 1}, "one is still there, the other one was lost"


def test_an_orchestrator_chooses_names_and_victims() -> None:
    made = state()
    made.observe(ALL, 1.0)
    made.expect("awaited-1", "decode", "", 1.0, 100.0)
    made.observe([*ALL, beat("pod-x", "decode")], 2.0)
    assert made.counts()["decode", ""] == 3, "that one was awaited"
    made.dismiss(made.instances[2], 2.0, 100.0)
    made.observe([*ALL, beat("pod-x", "decode")], 3.0)
    assert made.counts()["decode", ""] == 2
    made.observe(ALL, 4.0)
    assert made.counts()["decode", ""] == 2, "another one left in its place"


def test_demand_is_what_routers_counted_since() -> None:
    made = state()
    made.observe([*ALL, router(100, 0)], 0.0)
    made.observe([*ALL, router(120, 0), router(50, 8, life="b")], 10.0)
    assert made.demand()["text"].recent.requests == 2.0, "the second router has counted before we heard it"
    assert made.demand()["multimodal"].recent.images == 0.0
    made.observe([*ALL, router(120, 0), router(80, 28, life="b")], 20.0)
    assert made.demand()["text"].recent.requests == 3.0, "of the last window"
    assert made.demand()["multimodal"].recent.images == 2.0


def test_demand_of_groups_that_are_not_known_is_left_out() -> None:
    """A router of another version may tell of some."""
    made = state()
    made.observe([*ALL, beat("router-0", service="router", demand={"text": Demand(1), "video": Demand(1)})], 0.0)
    made.observe([*ALL, beat("router-0", service="router", demand={"text": Demand(21), "video": Demand(9)})], 10.0)
    assert made.demand()["text"].recent.requests == 2.0


def test_a_look_in_short() -> None:
    made = state()
    loads = (StageLoad("decode", num_waiting=4, num_running=3),)
    made.observe([*ALL[:2], beat("decode-0", "decode", loads=loads), beat("decode-1", "decode", loads=loads)], 1.0)
    look = made.look()
    assert look.instances == {"decode": 2, "encoder": 1, "prefill": 1}
    assert (look.num_waiting, look.num_running, look.free_kv) == ({"decode": 8}, {"decode": 6}, 0.5)
    assert look.attainment == {}
