"""Clusters as elastic strategies see them, made by hand or at random."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from triptych.shared.cost_model.forms import PassCosts
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.elastic.actions import Decision, Drain, Launch, Switch
from triptych.shared.policies.elastic.views import ClusterView, ElasticCosts, ElasticInstance, GroupDemand, Limits, Rates
from triptych.shared.policies.groups import ANY, MULTIMODAL, TEXT, Group
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.policies.routing import TransferCosts

# One instance encodes 1000 image tokens a second, prefills 2000, and decodes 500 with 50 sequences; moving a token's KV takes
# 10 us, a switch half a second.
COSTS = ElasticCosts(
    encode=PassCosts(0.0, 0.001),
    prefill=PassCosts(0.0, 0.0005),
    decode=PassCosts(0.05, 0.0, sequence_s=0.001),
    capacity={"encoder": 1000.0, "prefill": 2000.0, "decode": 500.0},
    image_weight=1.0,
    kv=TransferCosts(0.0, 1e-5),
    tbt_s=0.1,
    role_switch_s=0.5,
    startup_s=30.0,
)
LONG_AGO_S = -1000.0
NUM_SLOTS = 100_000


def load(role: Role, num: int, num_tokens: int, num_waiting: int = 0) -> StageLoad:
    """num requests in all, with so many tokens together."""
    return StageLoad(role, num_waiting, num - num_waiting, num_tokens)


def instance(name: str, kind: str, group: Group = ANY, *loads: StageLoad, since_s: float = LONG_AGO_S) -> ElasticInstance:
    """Its KV slots are those that its decoding leaves."""
    used = sum(one.num_pending_tokens for one in loads if one.stage == "decode")
    return ElasticInstance(InstanceId(name), frozenset(ROLES_OF[kind]), group, loads, NUM_SLOTS, NUM_SLOTS - used, since_s)


def demand(rates: Rates, attainment: float | None = None) -> GroupDemand:
    """Steady."""
    num_ended = 100 if attainment is not None else 0
    return GroupDemand(rates, rates, rates.images_per_request, attainment, num_ended, now=rates)


def view(
    instances: Iterable[ElasticInstance], text: GroupDemand | None = None, images: GroupDemand | None = None, **fields: object
) -> ClusterView:
    """A pool of fixed size at time 0, unless fields say otherwise."""
    members = tuple(instances)
    given = {
        "now_s": 0.0,
        "costs": COSTS,
        "limits": Limits(len(members), len(members)),
        "demand": {TEXT: text or GroupDemand(), MULTIMODAL: images or GroupDemand()},
        **fields,
    }
    return ClusterView(instances=members, **given)  # type: ignore[arg-type]


def after(seen: ClusterView, decisions: Iterable[Decision], seconds: float) -> ClusterView:
    """The same cluster when all that was decided is done, and all that waited or ran is; the demand is what it was."""
    members = {one.instance_id: replace(one, loads=(), num_free_slots=one.num_slots) for one in seen.instances}
    for decision in decisions:
        action = decision.action
        if isinstance(action, Switch):
            old = members[action.instance_id]
            members[old.instance_id] = replace(old, roles=action.roles, group=action.group, since_s=seen.now_s)
        elif isinstance(action, Drain):
            del members[action.instance_id]
        elif isinstance(action, Launch):
            started = [
                instance(f"{action.kind}-{seen.now_s:.0f}-{index}", action.kind, action.group, since_s=seen.now_s)
                for index in range(action.count)
            ]
            members |= {one.instance_id: one for one in started}
    return replace(seen, now_s=seen.now_s + seconds, instances=tuple(members.values()))


rates = st.builds(
    Rates,
    requests=st.floats(0, 20),
    text_tokens=st.floats(0, 10_000),
    images=st.floats(0, 20),
    image_tokens=st.floats(0, 10_000),
    output_tokens=st.floats(0, 3000),
)
demands = st.builds(
    GroupDemand, rates, rates, st.floats(0, 8), st.one_of(st.none(), st.floats(0, 1)), st.integers(0, 200), rates
)


@st.composite
def loads(draw: st.DrawFn, role: Role) -> StageLoad:
    num = draw(st.integers(0, 40))
    return StageLoad(role, draw(st.integers(0, num)), num, draw(st.integers(num, 2000 * num)) if num else 0)


@st.composite
def instances(draw: st.DrawFn, groups: tuple[Group, ...], kinds: tuple[str, ...]) -> list[ElasticInstance]:
    members = []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(kinds))
        own = [draw(loads(role)) for role in ROLES_OF[kind]]
        one = instance(
            f"i{index:02d}", kind, draw(st.sampled_from(groups)), *own, since_s=draw(st.sampled_from([0.0, -5.0, -1000.0]))
        )
        members.append(one)
    return members
