"""Which instance gets each piece of one attempt: the policy set's rules, with the loads and counts that they go by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from triptych.services.router.load_book import InstanceView, LoadBook
from triptych.services.router.record import STAGES
from triptych.shared.errors import InstanceLost
from triptych.shared.messages import InstanceId, Role
from triptych.shared.policies.follow_ups import NO_HOSTS, Hosts
from triptych.shared.policies.groups import ANY, Group
from triptych.shared.policies.policy_set import PolicySet
from triptych.shared.policies.routing import Choice, ImageWork, PromptWork
from triptych.shared.policies.sharding import DivisibleImage, Share

Choose = Callable[[Sequence[InstanceView]], Choice | None]


def _turns() -> dict[str, Iterator[int]]:
    return {name: itertools.count() for name in (*STAGES, "home")}


@dataclass(frozen=True, slots=True)
class Routing:
    """What all attempts of a router share."""

    policies: PolicySet
    book: LoadBook
    turns: Mapping[str, Iterator[int]] = field(default_factory=_turns)


class Routes:
    """Of one attempt, at a request of that group. Where stages are coupled they share an instance, the attempt's home, chosen
    with the first of them."""

    def __init__(self, routing: Routing, group: Group = ANY) -> None:
        self._routing = routing
        self._group = group
        self._rules = routing.policies.routing
        self._home: InstanceId | None = None
        self._is_bound = False

    @property
    def is_coupled(self) -> bool:
        return bool(self._rules.coupled)

    def encoder(self, image: ImageWork) -> Choose:
        return self._in_group(
            lambda views: self._rules.encoder(views, image, self._turn("encoder"), self._home_for("encoder", views))
        )

    def shares(self, image: DivisibleImage) -> Sequence[Share]:
        """How an image is divided among encoders; none: it stays whole."""
        return () if self.is_coupled else self._routing.policies.sharding(self.views("encoder"), image)

    def prefill(self, prompt: PromptWork) -> Choose:
        tried: set[InstanceId] = set()

        def choose(views: Sequence[InstanceView]) -> Choice | None:
            turn, home = self._turn("prefill"), self._home_for("prefill", views)
            choice = self._rules.prefill(views, prompt, turn, home, self.hosts(prompt, tried))
            tried.update(() if choice is None else (choice.instance_id,))  # it will not be better there in a moment
            return choice

        return self._in_group(choose)

    def decode(self, num_blocks: int, prefill_id: InstanceId) -> Choose:
        return self._in_group(lambda views: self._rules.decode(views, num_blocks, prefill_id, self._home_for("decode", views)))

    def views(self, stage: Role) -> Sequence[InstanceView]:
        """Candidates for a stage."""
        return self._rules.candidates(self._routing.book.views(stage), self._group)

    def bind(self, instance_id: InstanceId) -> None:
        """Something of the attempt is at that instance now: if it is the home, it stays that."""
        self._is_bound = self._is_bound or instance_id == self._home

    def may_be_at(self, stage: Role, instance_id: InstanceId) -> bool:
        """Whether that stage of the attempt may be there: anywhere, or only at its home."""
        return stage not in self._rules.coupled or self._home_for(stage, self.views(stage)) == instance_id

    def hosts(self, prompt: PromptWork, leave_out: Collection[InstanceId] = ()) -> Hosts:
        """Who may go on with it as a follow-up: decode instances, and those that prefill for the other group."""
        holders = [holder for holder in self._rules.follow_ups.holders(prompt) if holder not in leave_out]
        if not holders:
            return NO_HOSTS
        usual = _ids(self.views("prefill"))
        hosts = [view for view in self._routing.book.hosts(holders) if view.instance_id not in usual]
        if not hosts:
            return NO_HOSTS
        return Hosts(self._rules.candidates(hosts, self._group), self._routing.book.views("decode"))

    def _in_group(self, choose: Choose) -> Choose:
        return lambda views: choose(self._rules.candidates(views, self._group))

    def _turn(self, name: str) -> int:
        return next(self._routing.turns[name])

    def _home_for(self, stage: Role, views: Sequence[InstanceView]) -> InstanceId | None:
        """Chosen again while nothing is there, when it is no candidate any more. Raises InstanceLost when something was."""
        if stage not in self._rules.coupled:
            return None
        if self._is_bound:
            if self._home not in _ids(self._routing.book.views(stage)):
                raise InstanceLost("the instance that the request began on is gone", instance_id=self._home or "")
        elif self._home not in _ids(views):
            by_stage: dict[Role, Sequence[InstanceView]] = {one: self.views(one) for one in self._rules.coupled}
            by_stage[stage] = views
            choice = self._rules.home(by_stage, self._turn("home"))
            self._home = choice.instance_id if choice is not None else None
        return self._home


def _ids(views: Sequence[InstanceView]) -> set[InstanceId]:
    return {view.instance_id for view in views}
