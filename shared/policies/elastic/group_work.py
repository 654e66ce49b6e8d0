"""One group of instances while decisions are made: who has which role, how long its work takes, and what it costs when another
stage takes one of them. Used by the strategies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.shared.messages import Role
from triptych.shared.policies.elastic.gain_cost import DecodeSet, batches_s, cost, gain
from triptych.shared.policies.elastic.needs import STAGES, STAGES_OF
from triptych.shared.policies.elastic.views import ElasticCosts, ElasticInstance
from triptych.shared.policies.groups import TEXT, Group

MAX_LENGTHS = 1000  # chosen: of waiting prompts that are looked at; more change nothing


@dataclass(frozen=True, slots=True)
class Price:
    """What one more, or one fewer, instance changes. value: gain or cost, in seconds per token. terms: what it is made of."""

    value: float
    terms: Mapping[str, float]


@dataclass(slots=True)
class GroupWork:
    """members: changed by whoever decides. lengths: of what waits for encoder and prefill, of equal lengths, since instances
    only tell sums. decode: all that its decode instances run. w: weight of slower decoding (gain_cost.py). is_coupled:
    encoding is a part of prefill, where it is computed."""

    name: Group
    members: list[ElasticInstance]
    costs: ElasticCosts
    lengths: Mapping[Role, Sequence[int]]
    decode: DecodeSet
    w: float
    is_coupled: bool = False

    @classmethod
    def of(
        cls, name: Group, members: Sequence[ElasticInstance], costs: ElasticCosts, output_tokens: float, w: float
    ) -> GroupWork:
        """output_tokens: of one request, on average."""
        loads = [load for member in members for load in member.loads if load.stage == "decode"]
        slots = [member.num_slots for member in members if "decode" in member.roles and not member.is_starting]
        decode = DecodeSet(
            sum(load.num_waiting + load.num_running for load in loads),
            sum(load.num_pending_tokens for load in loads),
            max(output_tokens, 1.0),
            min(slots, default=0),
        )
        computing: tuple[Role, ...] = ("encoder", "prefill")
        return cls(name, list(members), costs, {role: _lengths(members, role) for role in computing}, decode, w)

    @property
    def stages(self) -> tuple[Role, ...]:
        return STAGES_OF[TEXT] if self.is_coupled else STAGES_OF.get(self.name, STAGES)

    def roles_of(self, stage: Role) -> frozenset[Role]:
        """Of an instance that is given to a stage."""
        return frozenset(("encoder", "prefill") if self.is_coupled and stage == "prefill" else (stage,))

    def servers(self, role: Role) -> list[ElasticInstance]:
        """Who serves that stage, now or as soon as it has switched."""
        return [member for member in self.members if role in member.roles and not member.is_starting]

    def compute_s(self, role: Role, num_instances: int) -> float:
        """T: until num_instances have computed all that waits for encoder or prefill."""
        encode_s = batches_s(self.lengths["encoder"], self.costs.encode)
        if role == "encoder":
            return encode_s / num_instances
        prefill_s = batches_s(self.lengths["prefill"], self.costs.prefill)
        return (prefill_s + encode_s * self.is_coupled) / num_instances

    def gain_of(self, role: Role) -> Price:
        """Of one more instance for that stage."""
        num = len(self.servers(role))
        if role == "decode":
            slowdown_s = self.decode.slowdown_s(self.costs.decode, num, num + 1)
            return Price(cost(self._outputs, 0.0, -slowdown_s, self.w), {"L_s": slowdown_s, "w": self.w, **self._decode_terms})
        before_s = self.compute_s(role, num)
        after_s = min(before_s, (num * before_s + self.costs.role_switch_s) / (num + 1))  # it helps when it has switched
        return Price(gain(self.lengths[role], before_s, after_s), {"T_s": before_s, "T_after_s": after_s})

    def cost_of(self, role: Role, migration_s: float = 0.0) -> Price:
        """Of one instance less in that stage, which keeps at least one. migration_s: M, of what moves."""
        num = len(self.servers(role))
        if num < 2:
            return Price(math.inf, {})
        if role != "decode":
            before_s, after_s = self.compute_s(role, num), self.compute_s(role, num - 1)
            return Price(gain(self.lengths[role], after_s, before_s), {"its_T_s": before_s, "its_T_after_s": after_s})
        slowdown_s = self.decode.slowdown_s(self.costs.decode, num, num - 1)
        terms = {"M_s": migration_s, "L_s": slowdown_s, "w": self.w, **self._decode_terms}
        return Price(cost(self._outputs, migration_s, slowdown_s, self.w), terms)

    def migration_s(self, instance: ElasticInstance) -> float:
        """M: of all that the instance decodes."""
        num_tokens = instance.load("decode").num_pending_tokens
        return self.costs.kv.transfer_s(num_tokens) if num_tokens else 0.0

    def least_affected(self, role: Role, able: Sequence[ElasticInstance]) -> ElasticInstance | None:
        """e_max: of decode instances the one with most free KV slots, if peers have room for what it runs; of others the one
        with least to do. able: those that may be taken; the stage keeps one."""
        servers = self.servers(role)
        if len(servers) < 2 or not able:
            return None
        if role != "decode":
            return min(able, key=lambda one: (one.load(role).num_pending_tokens, one.instance_id))
        best = max(able, key=lambda one: (one.num_free_slots, one.instance_id))
        room = sum(one.num_free_slots for one in servers if one is not best)
        return best if best.load("decode").num_pending_tokens <= room else None

    @property
    def _outputs(self) -> list[float]:
        return [self.decode.output_tokens] * self.decode.num_sequences

    @property
    def _decode_terms(self) -> dict[str, float]:
        return {"num_decoding": self.decode.num_sequences, "output_tokens": self.decode.output_tokens}


def _lengths(members: Sequence[ElasticInstance], role: Role) -> list[int]:
    """Of what waits or runs there, equal shares of the pending tokens."""
    lengths: list[int] = []
    for member in members:
        load = member.load(role)
        num = load.num_waiting + load.num_running
        if num and load.num_pending_tokens:
            lengths += [max(1, load.num_pending_tokens // num)] * num
    return lengths[:MAX_LENGTHS]
