"""By which rules a policy set routes: coupled or stage by stage, by load or in turn. Data with the choices that follow from it.

Used by the router and the simulator; the choices themselves are in routing.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.follow_ups import NEVER, NO_HOSTS, FollowUps, Hosts
from triptych.shared.policies.groups import Group, Grouped, of_group
from triptych.shared.policies.pace import Pace
from triptych.shared.policies.routing import (
    Choice,
    ImageWork,
    PromptWork,
    choose_decode,
    choose_encoder,
    choose_prefill,
    in_turn,
)
from triptych.shared.policies.views import StageView

View = TypeVar("View", bound=StageView)
InGroup = TypeVar("InGroup", bound=Grouped)

NO_STAGE: frozenset[Role] = frozenset()


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """coupled: the stages of a request that all go to one instance, its home, which is chosen before the first of them. The
    other stages are chosen when their inputs are there (late binding). is_in_turn: round robin, where load does not count.
    has_groups: requests keep to the instances of their group, as long as it has some for a stage. follow_ups: when a prompt is
    computed where an instance that only decodes holds most of it.

    turn: the caller's count of such choices up to now. home: of the request; None where nothing is coupled.
    """

    coupled: frozenset[Role] = NO_STAGE
    is_in_turn: bool = False
    has_groups: bool = False
    follow_ups: FollowUps = NEVER

    def candidates(self, views: Sequence[InGroup], group: Group) -> Sequence[InGroup]:
        """Of a stage's instances those that a request of that group may go to."""
        return of_group(views, group) if self.has_groups else views

    def home(self, by_stage: Mapping[Role, Sequence[StageView]], turn: int) -> Choice | None:
        """Of the instances that are candidates for all coupled stages: the next in turn, or the one with least work, in seconds
        of encoding and prefill, then by its requests in all stages. As a load balancer before coupled servers does it."""
        stages = [by_stage[stage] for stage in sorted(self.coupled)]
        ids = set.intersection(*({view.instance_id for view in views} for views in stages))
        able = [[view for view in views if view.instance_id in ids] for views in stages]
        if self.is_in_turn or not ids:
            return in_turn(able[0], turn)
        work_s, num_requests = dict.fromkeys(ids, 0.0), dict.fromkeys(ids, 0)
        for stage, views in zip(sorted(self.coupled), able, strict=True):
            pace = Pace.of(views)
            for view in views:
                num_requests[view.instance_id] += view.num_requests
                if stage != "decode":  # its tokens in context are no work yet to do
                    work_s[view.instance_id] += view.num_pending_tokens / pace.at(view)
        best = min(ids, key=lambda id_: (work_s[id_], num_requests[id_], id_))
        return Choice(best, f"least work of {len(ids)} candidates: {work_s[best]:.3f} s, {num_requests[best]} requests")

    def encoder(
        self, candidates: Sequence[StageView], image: ImageWork, turn: int, home: InstanceId | None = None
    ) -> Choice | None:
        """Who encodes one image, or holds it."""
        at_home = self._at_home("encoder", candidates, home)
        return in_turn(at_home, turn) if self._goes_round("encoder") else choose_encoder(at_home, image)

    def prefill(
        self,
        candidates: Sequence[StageView],
        prompt: PromptWork,
        turn: int,
        home: InstanceId | None = None,
        hosts: Hosts = NO_HOSTS,
    ) -> Choice | None:
        """Who computes a prompt, and with whose KV. Coupled servers share none."""
        if self._goes_round("prefill"):
            return in_turn(candidates, turn)
        if "prefill" in self.coupled:
            prompt = replace(prompt, kv_costs=None)
        choice = choose_prefill(self._at_home("prefill", candidates, home), prompt)
        return self.follow_ups.choose(hosts, prompt, candidates, choice) or choice

    def decode(
        self, candidates: Sequence[StageView], num_blocks: int, prefill_id: InstanceId, home: InstanceId | None = None
    ) -> Choice | None:
        """Who goes on after the first token."""
        return choose_decode(self._at_home("decode", candidates, home), num_blocks, prefill_id)

    def _goes_round(self, stage: Role) -> bool:
        return self.is_in_turn and stage not in self.coupled

    def _at_home(self, stage: Role, candidates: Sequence[View], home: InstanceId | None) -> Sequence[View]:
        return [view for view in candidates if view.instance_id == home] if stage in self.coupled else candidates
