"""What elastic policies see of a cluster: its instances, what is asked of it, what work costs. Values only.

All times are seconds on one clock (modelled ones where instances are emulated), all rates are per second of it. Made by the
scaler from heartbeats, and by simulators from their own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.shared.cost_model.forms import PassCosts
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.groups import ANY, Group
from triptych.shared.policies.routing import TransferCosts


@dataclass(frozen=True, slots=True)
class ElasticInstance:
    """One instance with engine roles that is neither draining nor failing.

    loads: what it has to do, one for each role that has told of any. num_slots, num_free_slots: of how many tokens it can hold
    the KV in all, and has room for (what only its cache holds is room). since_s: when it got its roles and group. is_ready:
    False while it starts (from the launch on) or switches: it counts as what it will be, and nothing is decided about it.
    is_starting: so it serves nobody for long; a switch is over at once.
    """

    instance_id: InstanceId
    roles: frozenset[Role]
    group: Group = ANY
    loads: tuple[StageLoad, ...] = ()
    num_slots: int = 0
    num_free_slots: int = 0
    since_s: float = 0.0
    is_ready: bool = True
    is_starting: bool = False

    def load(self, role: Role) -> StageLoad:
        """Of a role that has told of nothing: none."""
        return next((load for load in self.loads if load.stage == role), StageLoad(role))

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs in any role."""
        return not any(load.num_waiting or load.num_running for load in self.loads)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one group of requests asks for, each per second. Image tokens as they are counted in prompts."""

    requests: float = 0.0
    text_tokens: float = 0.0
    images: float = 0.0
    image_tokens: float = 0.0
    output_tokens: float = 0.0

    @property
    def images_per_request(self) -> float:
        return self.images / self.requests if self.requests else 0.0


NO_RATES = Rates()


@dataclass(frozen=True, slots=True)
class GroupDemand:
    """Measured by demand_meter.py. average: over minutes, late minutes count more. recent: over the last window.
    peak_images_per_request: of the window of late that had the highest, whatever the rate was. attainment: of the requests that
    ended in the last windows, num_ended in all, the share within SLO; None when none ended. now, growth: of a straight line
    through average and another one over some tens of seconds, each of which is late by its time constant, as long as it rises;
    growth is in a second."""

    average: Rates = NO_RATES
    recent: Rates = NO_RATES
    peak_images_per_request: float = 0.0
    attainment: float | None = None
    num_ended: int = 0
    now: Rates = NO_RATES
    growth: Rates = NO_RATES


@dataclass(frozen=True, slots=True)
class ElasticCosts:
    """What work costs on one instance; made by costs.py from a cost model, or from what instances measure.

    encode, prefill, decode: passes, tokens are image tokens, prompt tokens, and one for each sequence. capacity: M_C by role,
    the most that one instance does within the SLO, in image, prompt, and output tokens per second. image_weight: of an image
    token in prefill, in text tokens (1 where images join the prompt). kv: to move KV of some tokens to a peer. tbt_s: the
    target of a decode step; 0: none.
    """

    encode: PassCosts
    prefill: PassCosts
    decode: PassCosts
    capacity: Mapping[Role, float]
    image_weight: float
    kv: TransferCosts
    tbt_s: float
    role_switch_s: float
    startup_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of instances in all. Equal ones: nothing is launched or drained."""

    min_instances: int
    max_instances: int


@dataclass(frozen=True, slots=True)
class ClusterView:
    """demand: by group of requests, TEXT and MULTIMODAL, also where instances have no groups."""

    now_s: float
    instances: tuple[ElasticInstance, ...]
    costs: ElasticCosts
    limits: Limits
    demand: Mapping[Group, GroupDemand] = field(default_factory=dict)
