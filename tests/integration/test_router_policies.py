"""What the router does by its policy set: prompts that go ahead of their pictures, coupled stages, targets of the first token;
and pictures that are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fake_stages import ANSWER, FakeStage, World, picture, until, words
from triptych.shared.errors import InstanceLost, InternalError, Overloaded
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import EncodeRequest, PrefillRequest, PreprocessRequest

TRACE = {"X-Triptych-Trace": "1"}


def succeeded(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ANSWER
    return body


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def load(stage: FakeStage, name: str, num_pending_tokens: int = 0, tokens_per_s: float = 100.0) -> None:
    stage.loads = (StageLoad(name, num_pending_tokens=num_pending_tokens, tokens_per_s=tokens_per_s),)
    stage.beat()


class Landing:
    """Encoders whose pictures land when the test says so, by their number in the request's order of encoding."""

    def __init__(self, stage: FakeStage) -> None:
        self.stage = stage
        self.events: list[asyncio.Event] = []
        stage.hooks[EncodeRequest] = self.encode

    async def encode(self, request: EncodeRequest) -> Any:
        event = asyncio.Event()
        self.events.append(event)
        await event.wait()
        return await self.stage.default(request)


# --- overlap ----------------------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_ahead_of_its_pictures_when_that_saves_time(world: World) -> None:
    stages = world.add_all()
    load(stages["encoder"], "encoder", tokens_per_s=2.0)  # two seconds a picture
    load(stages["prefill"], "prefill", tokens_per_s=50.0)
    landing = Landing(stages["encoder"])
    asking = asyncio.create_task(world.ask([picture("a"), words(), picture("b"), words(), picture("c"), words()]))
    await until(lambda: bool(stages["prefill"].seen), "the prompt is at prefill")
    [request] = stages["prefill"].seen
    assert [(placed.embeddings, placed.is_awaited) for placed in request.images] == [(None, True)] * 3
    told = stages["prefill"].told
    for num_told, number in enumerate((1, 0, 2), start=1):
        landing.events[number].set()
        await until(lambda n=num_told: len(told) == n, "prefill is told")  # type: ignore[misc]
    assert [one.index for one in told] == [1, 0, 2]
    assert {one.request_id for one in told} == {request.request_id}
    succeeded(await asking)


async def test_what_has_landed_goes_along(world: World) -> None:
    """One encoder is quick: its picture is there before the prompt goes, whose other one is still being fetched."""
    stages = world.add_all()
    load(stages["encoder"], "encoder", tokens_per_s=2.0)
    load(stages["prefill"], "prefill", tokens_per_s=50.0)
    landing, go = Landing(stages["encoder"]), asyncio.Event()

    async def slow(request: PreprocessRequest) -> Any:
        if request.url is not None:
            await go.wait()
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = slow
    late = {"type": "image_url", "image_url": {"url": "http://pictures.test/a.png"}}
    asking = asyncio.create_task(world.ask([picture("a"), words(), late, words()]))
    await until(lambda: len(landing.events) == 1, "the first is being encoded")
    landing.events[0].set()
    await until(lambda: not world.router._running.parts.book.views("encoder")[0].num_requests, "it is encoded")  # type: ignore[union-attr]
    go.set()
    await until(lambda: bool(stages["prefill"].seen), "the prompt is at prefill")
    first, second = stages["prefill"].seen[0].images
    assert (first.embeddings is not None, first.is_awaited) == (True, False)
    assert (second.embeddings, second.is_awaited) == (None, True)
    landing.events[1].set()
    succeeded(await asking)


async def test_a_refused_prompt_is_sent_elsewhere_with_what_has_landed_by_then(world: World) -> None:
    stages = world.add_all()
    other = world.add("prefill-1", "prefill")
    for stage in (stages["prefill"], other):
        load(stage, "prefill", tokens_per_s=50.0)
    load(stages["encoder"], "encoder", tokens_per_s=2.0)
    landing = Landing(stages["encoder"])

    async def refuse(request: PrefillRequest) -> Any:
        landing.events[0].set()
        await until(lambda: bool(stages["prefill"].told), "the first is told")
        raise Overloaded("full")

    stages["prefill"].hooks[PrefillRequest] = refuse
    asking = asyncio.create_task(world.ask([picture("a"), words(), picture("b"), words()]))
    await until(lambda: bool(other.seen), "the other one has it")
    assert [placed.is_awaited for placed in other.seen[0].images] == [False, True]
    landing.events[1].set()
    succeeded(await asking)
    assert len(stages["prefill"].told) == 1


async def test_a_picture_that_fails_ends_a_prompt_that_waits_for_it(world: World) -> None:
    stages = world.add_all()
    load(stages["encoder"], "encoder", tokens_per_s=2.0)
    load(stages["prefill"], "prefill", tokens_per_s=50.0)
    landing = Landing(stages["encoder"])
    cancelled = asyncio.Event()

    async def hang(_request: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    stages["prefill"].hooks[PrefillRequest] = hang
    asking = asyncio.create_task(world.ask([picture("a"), words(), picture("b"), words()]))
    await until(lambda: bool(stages["prefill"].seen), "the prompt is at prefill")
    stages["encoder"].default = fail  # type: ignore[method-assign]
    landing.events[1].set()
    response = await asking
    assert (response.status_code, error_of(response)["code"]) == (500, "internal")
    assert cancelled.is_set()


async def fail(_request: Any) -> Any:
    raise InternalError


@pytest.mark.parametrize("policy", ["elasticmm", "triptych"])
async def test_a_prompt_waits_where_nothing_is_gained(toy_checkpoint: Path, policy: str) -> None:
    """By its policy, or since there is one picture behind a short text."""
    async with World(toy_checkpoint, policy=policy) as world:
        stages = world.add_all()
        load(stages["encoder"], "encoder", tokens_per_s=2.0)
        load(stages["prefill"], "prefill", tokens_per_s=1e6 if policy == "triptych" else 50.0)
        landing = Landing(stages["encoder"])
        asking = asyncio.create_task(world.ask([picture("a"), words()]))
        await until(lambda: len(landing.events) == 1, "it is being encoded")
        landing.events[0].set()
        succeeded(await asking)
        [request] = stages["prefill"].seen
        assert request.images[0].embeddings is not None
        await world.settled()


async def test_encoders_get_pictures_in_the_order_of_the_prompt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.services.router.pictures.PATIENCE_S", 20.0)
    stages = world.add_all()
    answered: list[str] = []

    async def last_first(request: PreprocessRequest) -> Any:
        if ".[0]." in request.param.removeprefix("messages.[0]"):
            await until(lambda: len(answered) == 2, "the other two are known")
        answered.append(request.param)
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = last_first
    succeeded(await world.ask([picture("a"), picture("b"), picture("c")]))
    encoded = [request.image.mm_hash for request in stages["encoder"].seen]
    assert encoded == [placed.image.mm_hash for placed in stages["prefill"].seen[0].images]


# --- coupled stages ---------------------------------------------------------------------------------------------------------


async def test_encoders_know_how_large_the_request_of_a_picture_is(world: World) -> None:
    stages = world.add_all()
    succeeded(await world.ask([picture("a"), picture("b"), words()]))
    seen = stages["encoder"].seen
    assert [request.num_request_tokens for request in seen] == [sum(request.image.num_tokens for request in seen)] * 2


async def test_coupled_stages_share_an_instance(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, policy="monolith") as world:
        world.add("preprocess-0", "preprocess")
        instances = [world.add(f"all-{i}", "encoder", "prefill", "decode") for i in range(2)]
        landings = [Landing(instance) for instance in instances]
        asking = [asyncio.create_task(world.ask([picture(f"{i}a"), picture(f"{i}b"), words()])) for i in range(8)]
        await until(lambda: sum(len(landing.events) for landing in landings) == 16, "all are being encoded")
        for landing in landings:
            for event in landing.events:
                event.set()
        for task in asking:
            succeeded(await task)
        requests = [{request.request_id for request in instance.seen} for instance in instances]
        assert not requests[0] & requests[1]
        assert len(requests[0]) == len(requests[1]) == 4, "as many each: by least work"
        await world.settled()


async def test_in_turn(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, policy="monolith_rr") as world:
        world.add("preprocess-0", "preprocess")
        instances = [world.add(f"all-{i}", "encoder", "prefill", "decode") for i in range(3)]
        for _ in range(6):
            succeeded(await world.ask())
        assert [len(instance.seen) for instance in instances] == [4, 4, 4]
        await world.settled()


@pytest.mark.parametrize("tell", [True, False])
async def test_a_home_that_is_lost_means_another_attempt_elsewhere(toy_checkpoint: Path, tell: bool) -> None:
    async with World(toy_checkpoint, policy="monolith", stage_wait_s=5.0) as world:
        world.add("preprocess-0", "preprocess")
        first = world.add("all-0", "encoder", "prefill", "decode")

        async def die(request: PrefillRequest) -> Any:
            world.add("all-1", "encoder", "prefill", "decode")
            first.die(tell=tell)
            if not tell:
                raise InstanceLost("gone", instance_id=first.instance_id)
            await asyncio.Event().wait()

        first.hooks[PrefillRequest] = die
        body = succeeded(await world.ask([picture("a"), words()], headers=TRACE))
        assert body["triptych"]["attempts"] == 2
        assert {stage["instance_id"] for stage in body["triptych"]["stages"]} == {"preprocess-0-abcd", "all-1-abcd"}
        await world.settled()


async def test_a_home_that_refuses_the_first_piece_is_left_for_another(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, policy="monolith") as world:
        world.add("preprocess-0", "preprocess")
        full, other = (world.add(f"all-{i}", "encoder", "prefill", "decode") for i in range(2))

        async def refuse(_request: Any) -> Any:
            raise Overloaded("full")

        full.hooks[PrefillRequest] = refuse
        succeeded(await world.ask())
        assert len(other.seen) == 2
        await world.settled()


# --- targets ----------------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_in_time_is_refused_at_once(world: World) -> None:
    stages = world.add_all()
    load(stages["prefill"], "prefill", num_pending_tokens=1000, tokens_per_s=100.0)
    refused = await world.ask(slo_ttft_ms=500)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "overloaded")
    assert int(refused.headers["retry-after"]) > 1
    assert not stages["prefill"].seen
    succeeded(await world.ask(slo_ttft_ms=60_000))
    succeeded(await world.ask())
    patient, without = (request for request in stages["prefill"].seen)
    assert 0 < patient.slack_s <= 60
    assert without.slack_s is None


async def test_targets_of_classes_and_slack_at_every_stage(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, slo_ttft_text_s=20, slo_ttft_picture_s=40) as world:
        stages = world.add_all()
        for content in ("text", [picture("a"), words()]):
            succeeded(await world.ask(content))
        text, with_picture = (request.slack_s for request in stages["prefill"].seen)
        assert 0 < text <= 20 < with_picture <= 40
        assert 20 < stages["encoder"].seen[0].slack_s < with_picture, "prefill has to do its part as well"
        load(stages["encoder"], "encoder", num_pending_tokens=10_000, tokens_per_s=10.0)
        assert (await world.ask([picture("b"), words()])).status_code == 503
        succeeded(await world.ask("text"))
        await world.settled()


# --- one picture is lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
async def test_a_picture_that_is_lost_each_time_is_named(world: World, ends: bool) -> None:
    """It ends its encoder each time: nobody tries it again. Or its encoders only lose it: later is better."""
    stages = world.add_all()

    def lose(stage: FakeStage, number: int) -> Callable[[EncodeRequest], Any]:
        async def encode(request: EncodeRequest) -> Any:
            if request.image.mm_hash != bad:
                return await stage.default(request)
            if not ends:
                raise InstanceLost("gone", code="tensor_gone")
            heir = world.add(f"heir-{number}", "encoder")
            heir.hooks[EncodeRequest] = lose(heir, number + 1)
            stage.die()
            await asyncio.Event().wait()

        return encode

    await world.ask([picture("bad")])
    bad = stages["encoder"].seen[0].image.mm_hash
    stages["encoder"].hooks[EncodeRequest] = lose(stages["encoder"], 1)
    response = await world.ask([words("x"), picture("good"), picture("bad")])
    error = error_of(response)
    assert (response.status_code, error["code"]) == ((500, "internal") if ends else (503, "overloaded"))
    assert error["param"] == "messages.[0].content.[2].image_url"
    assert "image 2" in error["message"]
    assert len(stages["decode"].seen) == 1, "it never got so far"


async def test_others_do_not_go_again_with_a_picture_that_is_lost(world: World) -> None:
    stages = world.add_all()
    other = world.add("encoder-1", "encoder")
    lost: list[bytes] = []

    def once(stage: FakeStage) -> Callable[[EncodeRequest], Any]:
        async def encode(request: EncodeRequest) -> Any:
            if not lost:
                lost.append(request.image.mm_hash)
                raise InstanceLost("gone", code="tensor_gone")
            return await stage.default(request)

        return encode

    for stage in (stages["encoder"], other):
        stage.hooks[EncodeRequest] = once(stage)
    body = succeeded(await world.ask([picture(f"{i}") for i in range(4)], headers=TRACE))
    assert body["triptych"]["attempts"] == 1
    encoded = [request.image.mm_hash for stage in (stages["encoder"], other) for request in stage.seen]
    assert len(encoded) == 5
    assert encoded.count(lost[0]) == 2
    assert len(stages["preprocess"].seen) == 5, "whoever pulled its pixels took them away"


async def test_reasons_are_told(world: World) -> None:
    world.add_all()
    body = succeeded(await world.ask([picture("a"), words()], headers=TRACE))
    assert all(stage["reason"] for stage in body["triptych"]["stages"])


async def test_a_client_that_leaves_while_an_attempt_fails_gets_no_other(world: World) -> None:
    """Its pictures' stages fail as they are cancelled."""
    stages = world.add_all()

    async def fail_when_cancelled(_request: EncodeRequest) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise InstanceLost("gone", code="request_released") from None

    stages["encoder"].hooks[EncodeRequest] = fail_when_cancelled
    asking = asyncio.create_task(world.ask([picture("a"), words()]))
    await until(lambda: bool(stages["encoder"].seen), "it is being encoded")
    asking.cancel()
    await until(lambda: not world.router._inflight, "the router let go of it")
    assert len(stages["encoder"].seen) == 1
