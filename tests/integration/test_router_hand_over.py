"""The router with requests that decode instances hand over: the stream goes on elsewhere, or is computed again where the KV got
lost, and the client sees nothing of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_stages import ANSWER, FakeStage, World, events, picture, text_of, words
from triptych.services.router import text_stages
from triptych.services.router.job import MAX_GIVEN_UP
from triptych.shared.engine.role import given_up
from triptych.shared.errors import InstanceLost, Overloaded
from triptych.shared.messages import Accepted, DecodeRequest, EncodeRequest, Message, PrefillRequest
from triptych.shared.token_bytes import BYTES_PER_TOKEN, pack_tokens, unpack_tokens
from triptych.shared.wire import MAX_PAYLOAD_BYTES

TRACED = {"X-Triptych-Trace": "1"}


@pytest.fixture
async def world(toy_checkpoint: Path) -> AsyncIterator[World]:
    """Every test must leave nothing behind."""
    async with World(toy_checkpoint, stage_wait_s=1.0, block_size=4) as made:
        yield made
        await made.settled()


def hands_over_after(decode: FakeStage, num_tokens: int) -> None:
    """The next one that it gets, when that has made so many."""

    async def some(request: DecodeRequest) -> Accepted:
        del decode.hooks[DecodeRequest]
        first = len(request.output) // BYTES_PER_TOKEN
        decode.spawn(decode.hand_over(request, decode.world.answer_ids[first : first + num_tokens]))
        return Accepted()

    decode.hooks[DecodeRequest] = some


def less_room(world: World, number: int) -> FakeStage:
    """One more decode instance, which comes after those of smaller numbers."""
    return world.add(f"decode-{number}", "decode", num_blocks=1000 - number)


def answer_of(response: Any, stream: bool) -> str:
    assert response.status_code == 200, response.text
    if stream:
        found = events(response.text)
        assert found[-1] == "[DONE]", found[-1]
        return text_of(found)
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_from_instance_to_instance(world: World, stream: bool) -> None:
    """And back: each goes on with all tokens so far and the KV of the one before."""
    first, second = world.add_all()["decode"], less_room(world, 1)
    hands_over_after(first, 3)
    hands_over_after(second, 0)
    response = await world.ask(stream=stream, logprobs=True, headers=TRACED)
    assert answer_of(response, stream) == ANSWER
    requests = [first.seen[0], second.seen[0], first.seen[1]]
    assert [request.output for request in requests] == [pack_tokens(world.answer_ids[:count]) for count in (1, 4, 4)]
    assert len({request.request_id for request in requests}) == 1
    assert [request.kv.tensor.owner for request in requests[1:]] == [first.instance_id, second.instance_id]
    trace = events(response.text)[-2]["triptych"] if stream else response.json()["triptych"]
    used = [stage["instance_id"] for stage in trace["stages"] if stage["stage"] == "decode"]
    assert (used, trace["attempts"]) == ([first.instance_id, second.instance_id, first.instance_id], 1)


async def test_who_refuses_is_passed_over(world: World) -> None:
    stages = world.add_all()
    hands_over_after(stages["decode"], 2)

    async def refuse(_request: Any) -> Any:
        raise Overloaded("no room")

    refusing, taking = less_room(world, 1), less_room(world, 2)
    refusing.hooks[DecodeRequest] = refuse
    assert answer_of(await world.ask(stream=True), True) == ANSWER
    assert [len(decode.seen) for decode in (stages["decode"], refusing, taking)] == [1, 1, 1]


async def test_where_nobody_else_takes_it_it_goes_back(world: World) -> None:
    """To an instance that takes nothing new: it has no choice either."""
    stages = world.add_all()
    decode = stages["decode"]

    async def once(request: DecodeRequest) -> Accepted:
        del decode.hooks[DecodeRequest]
        decode.stages = ()
        decode.beat()  # the role was taken away
        decode.spawn(decode.hand_over(request, world.answer_ids[1:4]))
        return Accepted()

    decode.hooks[DecodeRequest] = once
    assert answer_of(await world.ask(stream=True), True) == ANSWER
    assert [len(unpack_tokens(request.output)) for request in decode.seen] == [1, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_that_got_lost_is_computed_again(world: World, stream: bool) -> None:
    """With the output so far as a part of the prompt; what went before is not said again."""
    stages = world.add_all()
    hands_over_after(stages["decode"], 3)
    other = less_room(world, 1)

    async def gone(request: DecodeRequest) -> Accepted:
        lost = InstanceLost("a tensor is no longer held", code="tensor_gone")
        other.spawn(other.send(request, len(request.output) // BYTES_PER_TOKEN, error=lost.to_wire()))
        return Accepted()

    other.hooks[DecodeRequest] = gone
    response = await world.ask(stream=stream, headers=TRACED)
    assert answer_of(response, stream) == ANSWER
    again = stages["prefill"].seen[-1]
    assert again.num_output_tokens == 4
    assert unpack_tokens(again.prompt.inline)[-4:] == world.answer_ids[:4]
    assert again.request_id != stages["prefill"].seen[0].request_id
    assert [len(unpack_tokens(request.output)) for request in stages["decode"].seen] == [1, 5]


async def test_pictures_of_a_stream_are_found_where_they_are_cached(world: World) -> None:
    """Their files were let go of."""
    world.is_caching = True
    stages = world.add_all()
    hands_over_after(stages["decode"], 3)
    other = less_room(world, 1)

    async def die(_request: DecodeRequest) -> Any:
        other.die()
        raise InstanceLost("gone", instance_id=other.instance_id)

    other.hooks[DecodeRequest] = die
    response = await world.ask([picture("a"), words(), picture("b"), words()], stream=True)
    assert answer_of(response, True) == ANSWER
    first, again = stages["prefill"].seen
    assert all(placed.embeddings is not None for placed in first.images)
    assert all(placed.embeddings is None and not placed.is_awaited for placed in again.images)
    assert (len(stages["preprocess"].seen), len(stages["encoder"].seen)) == (2, 2)


async def test_pictures_that_nobody_has_any_more_end_the_stream(world: World) -> None:
    stages = world.add_all()

    async def die(request: DecodeRequest) -> Any:
        async def work() -> None:
            await stages["decode"].stream(request, world.answer_ids[1:3], end=False)
            world.add("decode-1", "decode")
            stages["decode"].tasks.clear()
            stages["decode"].die()

        stages["decode"].spawn(work())
        return Accepted()

    stages["decode"].hooks[DecodeRequest] = die
    response = await world.ask([picture("a"), words()], stream=True)
    found = events(response.text)
    assert ANSWER.startswith(text_of(found))
    assert found[-1]["error"]["type"] == "server_error"
    assert "image 1" in found[-1]["error"]["message"]
    assert len(stages["preprocess"].seen) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_roles_that_end_are_no_failures_of_the_request(world: World, stream: bool) -> None:
    """It goes on after each, more often than it may fail."""
    decode = world.add_all()["decode"]
    num_left = world.settings.max_attempts + 2

    async def give_up(request: DecodeRequest) -> Accepted:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            del decode.hooks[DecodeRequest]
        first = len(request.output) // BYTES_PER_TOKEN

        async def work() -> None:
            await decode.stream(request, world.answer_ids[first : first + 2], end=False)
            await decode.send(request, first + 2, error=given_up().to_wire())

        decode.spawn(work())
        return Accepted()

    decode.hooks[DecodeRequest] = give_up
    assert answer_of(await world.ask(stream=stream), stream) == ANSWER
    assert len(decode.seen) == world.settings.max_attempts + 3


async def test_nor_are_they_of_a_picture(world: World) -> None:
    """It alone goes again."""
    encoder, max_attempts = world.add_all()["encoder"], world.settings.max_attempts

    async def give_up(request: EncodeRequest) -> Message:
        if len(encoder.seen) <= max_attempts + 2:
            raise given_up()
        return await encoder.default(request)

    encoder.hooks[EncodeRequest] = give_up
    response = await world.ask([picture("a"), words()], headers=TRACED)
    assert answer_of(response, stream=False) == ANSWER
    assert (len(encoder.seen), response.json()["triptych"]["attempts"]) == (max_attempts + 3, 1)


@pytest.mark.parametrize(("stage", "kind"), [("encoder", EncodeRequest), ("prefill", PrefillRequest)])
async def test_one_that_is_always_given_up_ends(world: World, stage: str, kind: type[Message]) -> None:
    chosen = world.add_all()[stage]

    async def give_up(_request: Any) -> Any:
        raise given_up()

    chosen.hooks[kind] = give_up
    response = await world.ask([picture("a"), words()])
    assert (response.status_code, len(chosen.seen)) == (503, MAX_GIVEN_UP)


async def test_what_was_handed_over_waits_for_room_until_its_deadline(toy_checkpoint: Path) -> None:
    """Longer than a request waits that nobody has begun: its KV does, too. Its role has ended where it was."""
    async with World(toy_checkpoint, stage_wait_s=0.05, block_size=4) as world:
        first, second = world.add_all()["decode"], less_room(world, 1)
        num_refused = 0

        async def refuse(_request: Any) -> Any:
            nonlocal num_refused
            num_refused += 1
            if num_refused == 8:  # after rounds of 20, 40, 80 ms and so on
                del second.hooks[DecodeRequest]
            raise Overloaded("no room", code="stage_unavailable")

        async def begin(request: DecodeRequest) -> Accepted:
            first.hooks[DecodeRequest] = second.hooks[DecodeRequest] = refuse
            first.spawn(first.hand_over(request, world.answer_ids[1:4]))
            return Accepted()

        first.hooks[DecodeRequest] = begin
        assert answer_of(await world.ask(stream=True), True) == ANSWER
        await world.settled()


async def test_usage_tells_what_was_cached_when_the_request_came(world: World) -> None:
    """Not what was computed for it, and found again."""
    world.is_caching = True
    stages = world.add_all()

    async def gone(request: DecodeRequest) -> Accepted:
        del stages["decode"].hooks[DecodeRequest]
        raise InstanceLost("a tensor is no longer held", code="tensor_gone")

    stages["decode"].hooks[DecodeRequest] = gone
    response = await world.ask([words()])
    assert answer_of(response, False) == ANSWER
    assert len(stages["prefill"].seen) == 2
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_an_output_that_is_too_long_for_a_message_is_pulled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prompt of that length is."""
    first, second = world.add_all()["decode"], less_room(world, 1)
    num_tokens = len(world.answer_ids) - 3
    monkeypatch.setattr(text_stages, "MESSAGE_SLACK_BYTES", MAX_PAYLOAD_BYTES - BYTES_PER_TOKEN * num_tokens)
    hands_over_after(first, num_tokens)
    assert answer_of(await world.ask(stream=True), True) == ANSWER
    assert [request.long_output is not None for request in (*first.seen, *second.seen)] == [False, True]
    assert world.blobs == [pack_tokens(world.answer_ids[: num_tokens + 1])]
