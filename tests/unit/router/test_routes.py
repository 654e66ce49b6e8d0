"""Which instance an attempt's pieces go to: the home of coupled stages, and turns that all attempts share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from triptych.services.router.load_book import InstanceView, LoadBook
from triptych.services.router.routing import Routes, Routing
from triptych.shared.errors import InstanceLost
from triptych.shared.instance_info import Resources
from triptych.shared.messages import Heartbeat, InstanceId, Lost, Role
from triptych.shared.policies.policy_set import policy_set
from triptych.shared.policies.routing import ImageWork, PromptWork
from triptych.shared.registry import Registry

ALL: tuple[Role, ...] = ("encoder", "prefill", "decode")


class Cluster:
    """Instances with all roles, and the routing over them."""

    def __init__(self, policy: str, *names: str) -> None:
        self.registry = Registry(1e9)
        self.book = LoadBook(self.registry, "", 16)
        self.routing = Routing(policy_set(policy), self.book)
        for name in names:
            self.add(name)

    def add(self, name: str, group: str = "") -> None:
        beat = Heartbeat(
            InstanceId(name), name, "instance", "ready", ALL, "", 1.0, "", (), Resources(1, 1, 0, 9, 9), group=group
        )
        self.registry.on_event(beat, time.monotonic())

    def lose(self, name: str) -> None:
        self.registry.on_event(Lost(InstanceId(name), name, 1, expected=False), time.monotonic())

    def encoder(self, routes: Routes, leave_out: Sequence[str] = (), image: ImageWork = ImageWork(1)) -> str | None:  # noqa: B008 - frozen
        return self._chosen(routes.encoder(image)(self._views("encoder", leave_out)))

    def prefill(self, routes: Routes, leave_out: Sequence[str] = ()) -> str | None:
        return self._chosen(routes.prefill(PromptWork(1))(self._views("prefill", leave_out)))

    def _views(self, stage: Role, leave_out: Sequence[str]) -> list[InstanceView]:
        return self.book.views(stage, [InstanceId(name) for name in leave_out])

    @staticmethod
    def _chosen(choice: object) -> str | None:
        return getattr(choice, "instance_id", None)


def test_all_pieces_go_home_however_loaded_it_is() -> None:
    cluster = Cluster("monolith", "a", "b")
    routes = Routes(cluster.routing)
    assert cluster.encoder(routes) == "a"
    routes.bind(InstanceId("a"))
    with cluster.book.hold(InstanceId("a"), "prefill", 1000):
        assert cluster.prefill(routes) == "a"
        assert cluster.encoder(Routes(cluster.routing)) == "b"


def test_a_home_is_left_while_nothing_is_there() -> None:
    cluster = Cluster("monolith", "a", "b")
    routes = Routes(cluster.routing)
    assert cluster.encoder(routes) == "a"
    assert cluster.encoder(routes, leave_out=["a"]) == "b"
    assert cluster.prefill(routes) == "b"
    routes.bind(InstanceId("b"))
    assert cluster.prefill(routes, leave_out=["b"]) is None, "it refuses: it is asked again"
    cluster.lose("b")
    with pytest.raises(InstanceLost):
        cluster.prefill(routes)


def test_a_home_comes_when_instances_do() -> None:
    cluster = Cluster("monolith")
    routes = Routes(cluster.routing)
    assert cluster.encoder(routes) is None
    cluster.add("a")
    assert cluster.encoder(routes) == "a"


def test_what_another_holds_does_not_move_a_home() -> None:
    cluster = Cluster("monolith", "a", "b")
    routes = Routes(cluster.routing)
    held = ImageWork(1, [InstanceId("b")])
    assert cluster.encoder(routes, image=held) == "a"
    assert [routes.may_be_at("encoder", InstanceId(name)) for name in "ab"] == [True, False]


def test_stages_apart_may_be_anywhere() -> None:
    cluster = Cluster("triptych", "a", "b")
    routes = Routes(cluster.routing)
    assert all(routes.may_be_at("prefill", InstanceId(name)) for name in "ab")
    assert cluster.encoder(routes, image=ImageWork(1, [InstanceId("b")])) == "b"
    assert not routes.is_coupled


def test_attempts_take_turns() -> None:
    cluster = Cluster("monolith_rr", "a", "b", "c")
    assert [cluster.prefill(Routes(cluster.routing)) for _ in range(6)] == ["a", "b", "c"] * 2
    apart = Cluster("modserve_decoup", "a", "b")
    assert [apart.encoder(Routes(apart.routing)) for _ in range(3)] == ["a", "b", "a"]
    assert [apart.prefill(Routes(apart.routing)) for _ in range(3)] == ["a", "b", "a"], "each stage by itself"


def test_requests_keep_to_their_group_as_long_as_it_has_somebody() -> None:
    cluster = Cluster("elasticmm")
    cluster.add("a", "text")
    cluster.add("b", "multimodal")
    text, pictures = Routes(cluster.routing, "text"), Routes(cluster.routing, "multimodal")
    assert (cluster.prefill(text), cluster.prefill(pictures), cluster.encoder(pictures)) == ("a", "b", "b")
    assert [view.instance_id for view in pictures.views("decode")] == ["b"]
    assert cluster.prefill(pictures, leave_out=["b"]) == "a", "it has refused: anybody else is better than nobody"
    cluster.add("0", "")
    assert cluster.prefill(text) == cluster.prefill(pictures) == "0", "for both"
    assert cluster.prefill(Routes(Cluster("triptych", "a").routing, "text")) == "0", "sets without groups don't ask"


def test_coupled_stages_of_a_group_have_their_home_in_it() -> None:
    cluster = Cluster("elasticmm_emp")
    cluster.add("a", "text")
    cluster.add("b", "multimodal")
    routes = Routes(cluster.routing, "multimodal")
    assert (cluster.encoder(routes), cluster.prefill(routes)) == ("b", "b")
