"""A small simulated cluster, to judge elastic strategies before a real one does: not shipped, and no calibrated simulator.

Event by event: encode batches, prefill chunks and decode steps take what the cost model says, stages of an instance take turns,
switches, migrations and starts take time. Routing, queues and elasticity are the product's own functions.
Left out: preprocessing, the bus, caches, overlap, refusals, and what routers do not know yet (they see the present).
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from triptych.shared.cost_model.api import CostModel, DecodeBatch, PrefillChunk
from triptych.shared.cost_model.images import ImageShape
from triptych.shared.instance_info import Demand, StageLoad
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.batching import chunk_sizes, num_to_encode
from triptych.shared.policies.elastic.actions import Advise, Decision, Drain, Launch, Switch
from triptych.shared.policies.elastic.costs import costs_of
from triptych.shared.policies.elastic.demand_meter import DemandMeter
from triptych.shared.policies.elastic.strategy import NOTHING, Elasticity
from triptych.shared.policies.elastic.views import ClusterView, ElasticInstance, Limits
from triptych.shared.policies.groups import GROUPS, Group, group_of_request, of_group
from triptych.shared.policies.placement import ROLES_OF
from triptych.shared.policies.queueing import QueueOrder
from triptych.shared.policies.routing import ImageWork, PromptWork
from triptych.shared.policies.routing_rules import RoutingRules
from triptych.shared.policies.sharding import DivisibleImage, Sharding, undivided

MAX_ENCODE_TOKENS, MAX_NUM_SEQS = 16_384, 256  # as emulated instances have them
BLOCK_SIZE = 16
NOBODY = InstanceId("")
STAGES: tuple[Role, ...] = ("encoder", "prefill", "decode")


@dataclass(frozen=True)
class Arrival:
    """One request: images are of one size."""

    at_s: float
    num_text_tokens: int
    num_output_tokens: int
    num_images: int = 0


@dataclass
class Running:
    """A request, also as what waits of it: a prompt, an output. home: of a coupled one."""

    arrival: Arrival
    image: ImageShape
    slack_s: float | None
    parts_left: int = 0
    home: InstanceId | None = None
    computed: int = 0
    num_generated: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None

    @property
    def arrived_at_s(self) -> float:
        return self.arrival.at_s

    work_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return self.arrival.num_text_tokens + self.arrival.num_images * self.image.num_tokens

    @property
    def num_context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated

    @property
    def group(self) -> Group:
        return group_of_request(self.arrival.num_images)


@dataclass(eq=False)
class Part:
    """An image of a request, or some pieces of it, that waits for an encoder."""

    running: Running
    shape: ImageShape

    @property
    def arrived_at_s(self) -> float:
        return self.running.arrived_at_s

    @property
    def slack_s(self) -> float | None:
        return self.running.slack_s

    @property
    def work_s(self) -> float:
        return self.running.work_s


@dataclass(eq=False)
class Instance:
    """A `StageView` of whichever stage `stage` names comes from view()."""

    instance_id: InstanceId
    roles: frozenset[Role]
    group: Group
    num_slots: int
    since_s: float
    ready_s: float
    parts: list[Part] = field(default_factory=list)
    prompts: list[Running] = field(default_factory=list)
    decoding: list[tuple[int, int, Running]] = field(default_factory=list)  # heap by the step at which an output ends
    num_steps: int = 0
    num_context_tokens: int = 0
    tokens_per_s: dict[Role, float] = field(default_factory=dict)
    last_stage: int = 0
    num_in_step: int = 0
    is_busy: bool = False
    is_leaving: bool = False

    def num_requests(self, role: Role) -> int:
        return len({"encoder": self.parts, "prefill": self.prompts, "decode": self.decoding}[role])

    def num_pending(self, role: Role) -> int:
        if role == "decode":
            return self.num_context_tokens
        if role == "encoder":
            return sum(part.shape.num_tokens for part in self.parts)
        return sum(running.num_prompt_tokens - running.computed for running in self.prompts)

    @property
    def num_free_slots(self) -> int:
        return self.num_slots - self.num_context_tokens

    @property
    def is_empty(self) -> bool:
        return not any(self.num_requests(role) for role in STAGES)

    def load(self, role: Role) -> StageLoad:
        pace = self.tokens_per_s.get(role, 0.0)
        return StageLoad(role, 0, self.num_requests(role), self.num_pending(role), pace)


@dataclass(frozen=True)
class View:
    """A `StageView`."""

    instance_id: InstanceId
    num_requests: int
    num_pending_tokens: int
    num_free_blocks: int
    tokens_per_s: float
    other_s: float
    has_images: bool
    decodes: bool
    group: Group


@dataclass(frozen=True)
class Setup:
    """layout: roles and group of each instance at the start. has_targets: whether queues know when first tokens are due,
    and the elastic strategy who was in time."""

    cost: CostModel
    layout: Sequence[tuple[frozenset[Role], Group]]
    routing: RoutingRules
    queue_order: QueueOrder
    elasticity: Elasticity
    limits: Limits
    sharding: Sharding = undivided
    image_size: tuple[int, int] = (896, 896)
    max_prefill_tokens: int = 8192
    slo_factor: float = 5.0
    has_targets: bool = True


@dataclass
class Outcome:
    """in_time: within slo_factor times its isolated TTFT and mean TBT."""

    requests: list[Running]
    in_time: list[bool]
    duration_s: float
    instance_seconds: float
    decisions: list[tuple[float, Decision]]

    @property
    def goodput_per_s(self) -> float:
        return sum(self.in_time) / self.duration_s

    @property
    def attainment(self) -> float:
        return sum(self.in_time) / len(self.in_time)

    @property
    def switches(self) -> list[tuple[float, Switch]]:
        return [(at_s, one.action) for at_s, one in self.decisions if isinstance(one.action, Switch)]


class World:
    """run() sends all arrivals and ends when the last request does, or after patience_s more."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.cost = setup.cost
        self.costs = costs_of(setup.cost, setup.cost.unknowns.rdma)
        self.image = setup.cost.image(*setup.image_size)
        self.num_slots = setup.cost.memory.kv_capacity_bytes // setup.cost.memory.kv_bytes_per_token
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.turns = {stage: itertools.count() for stage in STAGES}
        self.instances: dict[InstanceId, Instance] = {}
        for roles, group in setup.layout:
            self.add(roles, group, -1e9)
        self.waiting: list[tuple[Role, Part | Running]] = []
        self.requests: list[Running] = []
        self.meter = DemandMeter(0.0)
        self.counts = {name: dict.fromkeys(Demand.__struct_fields__, 0) for name in GROUPS}
        self.memory = NOTHING
        self.decisions: list[tuple[float, Decision]] = []
        self.instance_seconds = 0.0
        self.num_open = 0

    def add(self, roles: frozenset[Role], group: Group, since_s: float, ready_s: float = 0.0) -> None:
        id_ = InstanceId(f"i{next(self.order):04d}")
        self.instances[id_] = Instance(id_, roles, group, self.num_slots, since_s, ready_s)

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), do))

    def run(self, arrivals: Sequence[Arrival], duration_s: float, patience_s: float = 60.0) -> Outcome:
        for arrival in arrivals:
            self.at(arrival.at_s, functools.partial(self.arrive, arrival))
        self.at(0.0, self.control)
        self.num_open = len(arrivals)
        while self.events and self.num_open and self.now_s < duration_s + patience_s:
            at_s, _, do = heapq.heappop(self.events)
            self.instance_seconds += len(self.instances) * (at_s - self.now_s)
            self.now_s = at_s
            do()
        in_time = [self.is_in_time(running) for running in self.requests]
        return Outcome(self.requests, in_time, duration_s, self.instance_seconds, self.decisions)

    # --- one request ---------------------------------------------------------------------------------------------------

    def isolated_s(self, arrival: Arrival) -> tuple[float, float]:
        """TTFT and TBT of a request alone."""
        num_image_tokens = arrival.num_images * self.image.num_tokens
        prompt = PrefillChunk(arrival.num_text_tokens + num_image_tokens)
        ttft_s = self.cost.encode_s([self.image] * arrival.num_images) + self.cost.prefill_s([prompt])
        return ttft_s, self.cost.decode_s(DecodeBatch(1, prompt.num_tokens))

    def is_in_time(self, running: Running) -> bool:
        if running.ended_s is None or running.first_token_s is None:
            return False
        ttft_s, tbt_s = self.isolated_s(running.arrival)
        factor, num_gaps = self.setup.slo_factor, max(1, running.arrival.num_output_tokens - 1)
        return (
            running.first_token_s - running.arrival.at_s <= factor * ttft_s
            and running.ended_s - running.first_token_s <= factor * tbt_s * num_gaps
        )

    def arrive(self, arrival: Arrival) -> None:
        ttft_s, _ = self.isolated_s(arrival)
        running = Running(arrival, self.image, self.setup.slo_factor * ttft_s if self.setup.has_targets else None)
        running.work_s = ttft_s
        self.requests.append(running)
        counts = self.counts[running.group]
        counts["num_requests"] += 1
        counts["num_text_tokens"] += arrival.num_text_tokens
        counts["num_images"] += arrival.num_images
        counts["num_image_tokens"] += arrival.num_images * self.image.num_tokens
        self.begin(running)

    def begin(self, running: Running) -> None:
        """Its pictures, and where it has none its prompt, go to whom the routing rules choose."""
        if self.setup.routing.coupled:
            by_stage = {stage: self.views(stage, running.group) for stage in STAGES}
            choice = self.setup.routing.home(by_stage, next(self.turns["prefill"]))
            assert choice is not None, "coupled servers are never all away"
            running.home = choice.instance_id
        images = [self.image] * running.arrival.num_images
        running.parts_left = len(images)
        for image in images:
            self.encode_somewhere(Part(running, image))
        if not images:
            self.dispatch("prefill", running)

    def encode_somewhere(self, part: Part) -> None:
        """Whole, or divided among several."""
        image, group = part.shape, part.running.group
        whole = DivisibleImage(image.num_pieces, image.num_tokens // image.num_pieces)
        shares = self.setup.sharding(self.views("encoder", group), whole)
        part.running.parts_left += max(0, len(shares) - 1)
        for share in shares:
            shape = ImageShape(share.num_pieces * whole.piece_tokens, share.num_pieces, image.patches_per_piece)
            self.encode_at(share.instance_id, Part(part.running, shape))
        if not shares:
            self.dispatch("encoder", part)

    def encode_at(self, instance_id: InstanceId, part: Part) -> None:
        self.instances[instance_id].parts.append(part)
        self.wake(self.instances[instance_id])

    def views(self, role: Role, group: Group, home: InstanceId | None = None) -> list[View]:
        """Candidates, as the router filters them. A home that leaves finishes what it has."""
        ready = [
            one
            for one in self.instances.values()
            if role in one.roles and one.ready_s <= self.now_s and (not one.is_leaving or one.instance_id == home)
        ]
        return [self.view(one, role) for one in of_group(ready, group)]

    def view(self, one: Instance, role: Role) -> View:
        other_s = sum(
            one.num_pending(other) / one.tokens_per_s[other]
            for other in STAGES[:2]
            if other != role and one.tokens_per_s.get(other)
        )
        return View(
            one.instance_id,
            one.num_requests(role),
            one.num_pending(role),
            one.num_free_slots // BLOCK_SIZE,
            one.tokens_per_s.get(role, 0.0),
            other_s,
            bool(one.parts),
            "decode" in one.roles,
            one.group,
        )

    def dispatch(self, role: Role, work: Part | Running, prefill_id: InstanceId = NOBODY) -> None:
        """To the instance that the routing rules choose; what nobody can take waits until somebody can."""
        running = work.running if isinstance(work, Part) else work
        home = running.home if role in self.setup.routing.coupled else None
        views, rules, turn = self.views(role, running.group, home), self.setup.routing, next(self.turns[role])
        if isinstance(work, Part):
            choice = rules.encoder(views, ImageWork(work.shape.num_tokens), turn, home)
        elif role == "prefill":
            choice = rules.prefill(views, PromptWork(running.num_prompt_tokens, kv_costs=self.costs.kv), turn, home)
        else:
            choice = rules.decode(views, running.num_context_tokens // BLOCK_SIZE + 1, prefill_id, home)
        if choice is None:
            self.waiting.append((role, work))
            return
        one = self.instances[choice.instance_id]
        if isinstance(work, Part):
            self.encode_at(one.instance_id, work)
        elif role == "prefill":
            one.prompts.append(running)
            self.wake(one)
        elif one.instance_id == prefill_id:
            self.join(one, running)
        else:
            one.num_context_tokens += running.num_context_tokens  # its slots are taken while it comes
            delay_s = self.costs.kv.transfer_s(running.num_context_tokens)
            self.at(self.now_s + delay_s, lambda: self.landed(one, running))

    def landed(self, one: Instance, running: Running) -> None:
        one.num_context_tokens -= running.num_context_tokens
        if one.instance_id in self.instances and "decode" in one.roles and not one.is_leaving:
            self.join(one, running)
        else:
            self.dispatch("decode", running)

    def join(self, one: Instance, running: Running) -> None:
        left = running.arrival.num_output_tokens - running.num_generated
        left += one.is_busy and STAGES[one.last_stage] == "decode"  # it is not in the step under way
        one.num_context_tokens += running.num_context_tokens
        heapq.heappush(one.decoding, (one.num_steps + left, next(self.order), running))
        self.wake(one)

    def end(self, running: Running) -> None:
        running.ended_s = self.now_s
        counts = self.counts[running.group]
        counts["num_ended"] += 1
        counts["num_output_tokens"] += running.arrival.num_output_tokens
        counts["num_in_time"] += not self.setup.has_targets or self.is_in_time(running)
        self.num_open -= 1

    # --- one instance --------------------------------------------------------------------------------------------------

    def wake(self, one: Instance) -> None:
        """Begin the next step: stages with work take turns."""
        if one.is_busy:
            return
        for turn in range(1, 4):
            stage = (one.last_stage + turn) % 3
            if one.num_requests(STAGES[stage]):
                one.last_stage, one.is_busy = stage, True
                duration_s, num_tokens, finish = (self.encode, self.prefill, self.decode)[stage](one)
                pace, old = num_tokens / duration_s, one.tokens_per_s.get(STAGES[stage], 0.0)
                one.tokens_per_s[STAGES[stage]] = pace if not old else old + 0.2 * (pace - old)
                self.at(self.now_s + duration_s, functools.partial(self.finished, one, finish))
                return
        if one.is_leaving:
            self.instances.pop(one.instance_id, None)

    def finished(self, one: Instance, finish: Callable[[], None]) -> None:
        one.is_busy = False
        finish()
        self.wake(one)

    def encode(self, one: Instance) -> tuple[float, int, Callable[[], None]]:
        one.parts = self.setup.queue_order(one.parts, self.now_s)
        sizes = [part.shape.num_tokens for part in one.parts]
        one.num_in_step = num_to_encode(sizes, MAX_ENCODE_TOKENS, one.tokens_per_s.get("encoder", 0.0))
        batch = one.parts[: one.num_in_step]

        def finish() -> None:
            for part in batch:
                one.parts.remove(part)
                part.running.parts_left -= 1
                if not part.running.parts_left:
                    self.dispatch("prefill", part.running)

        shapes = [part.shape for part in batch]
        return self.cost.encode_s(shapes), sum(shape.num_tokens for shape in shapes), finish

    def prefill(self, one: Instance) -> tuple[float, int, Callable[[], None]]:
        queue = one.prompts = self.setup.queue_order(one.prompts, self.now_s)
        sizes = chunk_sizes([running.num_prompt_tokens - running.computed for running in queue], self.setup.max_prefill_tokens)
        step = [(running, size) for running, size in zip(queue, sizes, strict=True) if size]
        one.num_in_step = len(step)

        def finish() -> None:
            for running, size in step:
                running.computed += size
                if running.computed == running.num_prompt_tokens:
                    one.prompts.remove(running)
                    running.first_token_s, running.num_generated = self.now_s, 1
                    if running.arrival.num_output_tokens <= 1:
                        self.end(running)
                    else:
                        self.dispatch("decode", running, one.instance_id)

        chunks = [PrefillChunk(size, running.computed) for running, size in step]
        return self.cost.prefill_s(chunks), sum(sizes), finish

    def decode(self, one: Instance) -> tuple[float, int, Callable[[], None]]:
        num = len(one.decoding)
        turns = max(1.0, num / MAX_NUM_SEQS, one.num_context_tokens / one.num_slots)  # beyond these they take turns

        def finish() -> None:
            if not one.decoding:
                return  # all of it has moved
            one.num_steps += 1
            one.num_context_tokens += num
            while one.decoding and one.decoding[0][0] <= one.num_steps:
                running = heapq.heappop(one.decoding)[2]
                running.num_generated = running.arrival.num_output_tokens
                one.num_context_tokens -= running.num_context_tokens
                self.end(running)

        return turns * self.cost.decode_s(DecodeBatch(round(num / turns), round(one.num_context_tokens / turns))), num, finish

    # --- elasticity ----------------------------------------------------------------------------------------------------

    def elastic_view(self) -> ClusterView:
        instances = tuple(
            ElasticInstance(
                one.instance_id,
                one.roles,
                one.group,
                tuple(one.load(role) for role in STAGES if role in one.roles or one.num_requests(role)),
                one.num_slots,
                one.num_free_slots,
                one.since_s,
                one.ready_s <= self.now_s,
            )
            for one in self.instances.values()
            if not one.is_leaving
        )
        return ClusterView(self.now_s, instances, self.costs, self.setup.limits, self.meter.demand())

    def control(self) -> None:
        self.meter = self.meter.add(self.now_s, {name: Demand(**counts) for name, counts in self.counts.items()})
        for counts in self.counts.values():
            counts.update(dict.fromkeys(counts, 0))
        decisions, self.memory = self.setup.elasticity.decide(self.elastic_view(), self.memory)
        for decision in decisions:
            self.decisions.append((self.now_s, decision))
            self.carry_out(decision)
        self.at(self.now_s + self.setup.elasticity.period_s, self.control)

    def carry_out(self, decision: Decision) -> None:
        action = decision.action
        if isinstance(action, Switch):
            one = self.instances[action.instance_id]
            one.roles, one.group, one.since_s = action.roles, action.group, self.now_s
            one.ready_s = self.now_s + self.costs.role_switch_s
            self.at(one.ready_s, self.retry)
            self.hand_over(one)
        elif isinstance(action, Launch):
            for _ in range(action.count):
                ready_s = self.now_s + self.costs.startup_s
                self.add(frozenset(ROLES_OF[action.kind]), action.group, self.now_s, ready_s)
                self.at(ready_s, self.retry)
        elif isinstance(action, Drain):
            one = self.instances[action.instance_id]
            one.is_leaving = True
            self.hand_over(one)
            self.wake(one)
        else:
            assert isinstance(action, Advise)

    def hand_over(self, one: Instance) -> None:
        """What has not begun in a stage that the instance leaves goes elsewhere; outputs move with their KV. What is coupled
        stays."""
        if self.setup.routing.coupled:
            return
        stays = frozenset() if one.is_leaving else one.roles
        if "decode" not in stays:
            moving, one.decoding, one.num_context_tokens = self.outputs(one), [], 0
            for running in moving:
                self.dispatch("decode", running)
        if "encoder" not in stays:
            num_begun = num_begun_in(one, "encoder")
            parts, one.parts = one.parts[num_begun:], one.parts[:num_begun]
            for part in parts:
                self.dispatch("encoder", part)
        if "prefill" not in stays:
            num_begun = num_begun_in(one, "prefill")
            prompts, one.prompts = one.prompts[num_begun:], one.prompts[:num_begun]
            for running in prompts:
                self.dispatch("prefill", running)

    def outputs(self, one: Instance) -> list[Running]:
        for ends_at_step, _, running in one.decoding:
            running.num_generated = running.arrival.num_output_tokens - (ends_at_step - one.num_steps)
        return [running for _, _, running in one.decoding]

    def retry(self) -> None:
        waiting, self.waiting = self.waiting, []
        for role, work in waiting:
            self.dispatch(role, work)


def num_begun_in(one: Instance, role: Role) -> int:
    """What is in the step under way, which is at the front."""
    return one.num_in_step if one.is_busy and STAGES[one.last_stage] == role else 0


def layout(text: str) -> Iterator[tuple[frozenset[Role], Group]]:
    """`text: prefill*2 decode*3; multimodal: encoder prefill decode`; a group may be left out: `instance*4 text*4`."""
    for part in text.split(";"):
        group, _, kinds = part.rpartition(":")
        for entry in kinds.split():
            kind, _, count = entry.partition("*")
            yield from [(frozenset(ROLES_OF[kind]), group.strip())] * int(count or 1)
