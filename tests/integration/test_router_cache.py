"""The router over the unified cache: what is known is neither sent, decoded, encoded nor computed again; a stale index costs an
attempt at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from support.fake_stages import ANSWER, IMAGE_TOKENS, TEXT, FakeStage, World, picture, until, words
from triptych.cache.index import CacheIndex
from triptych.cache.redis_index import RedisIndex
from triptych.shared.errors import CACHE_MISS, BadRequest, InstanceLost
from triptych.shared.http_host import listening_socket
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import EncodeRequest, PrefillRequest, PreprocessRequest


@pytest.fixture
def world(caching_world: World) -> World:
    return caching_world


def at_url(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://pictures.test/{name}.png"}}


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def forget_kv(world: World, *stages: FakeStage) -> None:
    for stage in stages:
        world.index.drop(stage.instance_id, "kv", stage.kv)
        stage.kv.clear()


def seen(stages: dict[str, FakeStage], *names: str) -> list[int]:
    return [len(stages[name].seen) for name in names]


# --- what is known is not done again ----------------------------------------------------------------------------------------


async def test_a_repeated_request_only_computes_its_last_block(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), picture("b"), words()]
    assert cached_tokens(await world.ask(content)) == 0
    assert seen(stages, "preprocess", "encoder", "prefill") == [2, 2, 1]
    assert not any(request.may_skip_decode for request in stages["preprocess"].seen), "the router has asked already"
    num_trips, num_uploads = world.index.counters.num_round_trips, world.num_media
    cached = cached_tokens(await world.ask(content))
    assert seen(stages, "preprocess", "encoder", "prefill") == [2, 2, 2]
    assert world.num_media == num_uploads
    assert world.index.counters.num_round_trips == num_trips + 1, "one question for the whole request"
    request = stages["prefill"].seen[-1]
    assert 0 < request.prompt.num_tokens - cached <= 4
    assert [(placed.embeddings, placed.is_awaited) for placed in request.images] == [(None, False)] * 2


async def test_a_router_that_never_saw_the_file_asks_the_index(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    files = world.router._running.parts.cache.files  # type: ignore[union-attr]
    files._images.clear()
    num_trips = world.index.counters.num_round_trips
    assert cached_tokens(await world.ask(content)) > 0
    assert seen(stages, "preprocess", "encoder") == [1, 1]
    assert world.index.counters.num_round_trips == num_trips + 2


async def test_a_follow_up_encodes_only_its_new_picture(world: World) -> None:
    stages = world.add_all()
    first = [picture("a"), picture("b"), words()]
    await world.ask(first)
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [picture("c"), words("And here?")]},
    ]
    response = await world.ask(messages=turns)
    assert cached_tokens(response) > 2 * IMAGE_TOKENS
    assert seen(stages, "preprocess", "encoder") == [3, 3]
    old, older, new = stages["prefill"].seen[-1].images
    assert old.embeddings is older.embeddings is None
    assert new.embeddings is not None


async def test_held_embeddings_are_leased_without_pixels(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    forget_kv(world, stages["prefill"])
    assert cached_tokens(await world.ask(content)) == 0
    assert seen(stages, "preprocess", "encoder") == [1, 2]
    assert stages["encoder"].seen[-1].pixels is None
    assert stages["prefill"].seen[-1].images[0].embeddings is not None


async def test_the_same_picture_elsewhere_in_a_prompt_is_not_encoded_again(world: World) -> None:
    stages = world.add_all()
    await world.ask([picture("a"), words()])
    await world.ask([words("first "), picture("b"), picture("a"), words()])
    assert [request.pixels is None for request in stages["encoder"].seen].count(True) == 1
    assert seen(stages, "preprocess") == [2]


async def test_the_same_pixels_in_another_file_are_only_decoded(world: World) -> None:
    """Whoever holds them: the KV, or after that is gone the embeddings. A new picture takes one question more than a text."""
    stages = world.add_all()
    world.add("a-encoder", "encoder")
    assert cached_tokens(await world.ask([picture("a"), words()])) == 0
    num_trips = world.index.counters.num_round_trips
    assert num_trips == 2, "is the file known? are its pixels, or the beginning of the prompt?"
    assert cached_tokens(await world.ask([picture("a#saved anew"), words()])) > IMAGE_TOKENS
    forget_kv(world, stages["prefill"])
    assert cached_tokens(await world.ask([picture("a#and again"), words()])) == 0
    assert world.index.counters.num_round_trips == 3 * num_trips
    asked = [request for stage in world.all_stages for request in stage.seen if isinstance(request, EncodeRequest)]
    assert sorted(request.pixels is None for request in asked) == [False, True]
    assert seen(stages, "preprocess") == [3]


async def test_a_picture_that_had_to_be_decoded_waits_for_no_other_one(world: World) -> None:
    stages = world.add_all()

    async def slow_first(request: PreprocessRequest) -> Any:
        if request.content == b"picture a":
            await until(lambda: bool(stages["encoder"].seen), "the second picture is encoded before the first one is known")
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = slow_first
    assert cached_tokens(await world.ask([picture("a"), picture("b"), words()])) == 0


async def test_text_shares_its_beginning(world: World) -> None:
    world.add_all()
    assert cached_tokens(await world.ask(TEXT + "one")) == 0
    assert cached_tokens(await world.ask(TEXT + "two")) > len(TEXT) // 8
    assert world.index.counters.num_round_trips == 2


async def test_text_asks_nobody_where_only_one_instance_has_kv(world: World) -> None:
    world.add("preprocess-0", "preprocess")
    world.add("all-0", "encoder", "prefill", "decode")
    await world.ask(TEXT)
    assert cached_tokens(await world.ask(TEXT)) > 0, "it finds what it has by itself"
    assert world.index.counters.num_round_trips == 0


async def test_nobody_is_asked_about_a_few_blocks_of_text(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, block_size=16) as world:
        world.is_caching = True
        world.add_all()
        for text, num_trips in (("hi", 0), (4 * TEXT, 1), ("hi", 1)):
            assert (await world.ask(text)).status_code == 200
            assert world.index.counters.num_round_trips == num_trips
        await world.settled()


async def test_tenants_share_nothing(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    for salt, num_encoded in (("one", 1), ("two", 2), ("", 3), ("one", 3)):
        cached = cached_tokens(await world.ask(content, cache_salt=salt))
        assert len(stages["encoder"].seen) == num_encoded
        assert (cached > 0) == (num_encoded == 3 and salt == "one")
    assert {request.cache_salt for request in stages["prefill"].seen} == {b"one", b"two", b""}


async def test_a_policy_without_a_cache_asks_nothing(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, policy="static", block_size=4) as world:
        world.is_caching = True
        stages = world.add_all()
        for _ in range(2):
            assert (await world.ask([picture("a"), words()])).status_code == 200
        assert seen(stages, "preprocess", "encoder") == [2, 2]
        assert world.index.counters.num_round_trips == 0
        assert not any(request.may_skip_decode for request in stages["preprocess"].seen)
        await world.settled()


# --- several choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [picture, at_url])
@pytest.mark.parametrize("index_is_late", [False, True])
async def test_choices_share_their_pictures(world: World, sent: Callable[[str], Any], index_is_late: bool) -> None:
    """Also when the index has not been told yet by those who hold them."""
    world.is_caching = not index_is_late
    stages = world.add_all()
    embeddings = stages["encoder"].embeddings

    async def encode(request: EncodeRequest) -> Any:
        reply = stages["encoder"].encode(request)
        embeddings.add(request.image.key)
        return reply

    stages["encoder"].hooks[EncodeRequest] = encode
    response = await world.ask([sent("a"), sent("b"), words()], n=3)
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == [ANSWER] * 3
    assert seen(stages, "preprocess", "prefill") == [2, 3]
    assert [request.pixels for request in stages["encoder"].seen].count(None) == (4 if index_is_late else 0)
    assert len(stages["encoder"].seen) == (6 if index_is_late else 2)


async def test_choices_end_with_the_one_that_went_ahead(world: World) -> None:
    stages = world.add_all()

    async def fail(_request: Any) -> Any:
        raise BadRequest("no picture", code="invalid_image")

    stages["encoder"].hooks[EncodeRequest] = fail
    assert (await world.ask([picture("a"), words()], n=2)).status_code == 400
    assert seen(stages, "preprocess", "encoder", "prefill") == [1, 1, 0]


async def test_choices_go_on_when_what_they_shared_is_gone(world: World) -> None:
    stages = world.add_all()

    async def forget(request: PrefillRequest) -> Any:
        reply = await stages["prefill"].default(request)
        forget_kv(world, stages["prefill"])
        stages["encoder"].embeddings.clear()
        return reply

    stages["prefill"].hooks[PrefillRequest] = forget
    response = await world.ask([picture("a"), words()], n=2)
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == [ANSWER] * 2
    assert seen(stages, "preprocess", "encoder") == [2, 3]


# --- pictures behind URLs ---------------------------------------------------------------------------------------------------


async def test_a_known_picture_at_a_url_is_only_identified(world: World) -> None:
    stages = world.add_all()
    content = [at_url("a"), words()]
    await world.ask(content)
    [first] = stages["prefill"].seen
    world.known[b"http://pictures.test/a.png"] = first.images[0].image
    assert cached_tokens(await world.ask(content)) > 0
    assert seen(stages, "preprocess", "encoder") == [2, 1]
    second = stages["prefill"].seen[-1].request_id
    assert stages["preprocess"].released.count(second) == 2, "its file goes with the first token, not with the last"


async def test_it_is_decoded_where_its_file_waits_when_its_pixels_are_needed(world: World) -> None:
    stages = world.add_all()
    other = world.add("preprocess-1", "preprocess")
    content = [at_url("a"), words()]
    await world.ask(content)
    world.known[b"http://pictures.test/a.png"] = stages["prefill"].seen[0].images[0].image
    forget_kv(world, stages["prefill"])
    stages["encoder"].embeddings.clear()
    world.index.drop(stages["encoder"].instance_id, "embeddings", [stages["prefill"].seen[0].images[0].image.mm_hash])
    assert cached_tokens(await world.ask(content)) == 0
    _, identified, decoded = stages["preprocess"].seen
    assert not other.seen
    assert (identified.may_skip_decode, decoded.may_skip_decode) == (True, False)
    assert decoded.url is None
    assert decoded.media_id is not None


async def test_a_picture_that_changed_at_its_url_is_not_taken_for_the_old_one(world: World) -> None:
    """Its file was identified, got lost with its instance, and is another one when it is fetched again."""
    stages = world.add_all()
    await world.ask([at_url("a"), words()])
    old = stages["prefill"].seen[0].images[0].image
    world.known[b"http://pictures.test/b.png"] = old
    forget_kv(world, stages["prefill"])
    stages["encoder"].embeddings.clear()
    world.index.drop(stages["encoder"].instance_id, "embeddings", [old.mm_hash])

    async def lose(request: PreprocessRequest) -> Any:
        if not request.may_skip_decode and request.media_id is not None:
            world.known.clear()
            raise InstanceLost("the file is gone", code="media_lost")
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = lose
    response = await world.ask([at_url("b"), words()], headers={"X-Triptych-Trace": "1"})
    assert cached_tokens(response) == 0
    assert response.json()["triptych"]["attempts"] == 2
    assert stages["prefill"].seen[-1].images[0].image.mm_hash != old.mm_hash


# --- a stale index ----------------------------------------------------------------------------------------------------------


async def test_embeddings_that_are_gone_are_made_again(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    forget_kv(world, stages["prefill"])
    stages["encoder"].embeddings.clear()
    response = await world.ask(content, headers={"X-Triptych-Trace": "1"})
    assert cached_tokens(response) == 0
    assert response.json()["triptych"]["attempts"] == 1
    assert [request.pixels is None for request in stages["encoder"].seen] == [False, True, False]
    await world.settled()
    assert "triptych_request_cache_stale_total 1.0" in (await world.http.get("/metrics")).text


async def test_kv_that_is_gone_costs_one_attempt_that_is_none(toy_checkpoint: Path) -> None:
    """Of max_attempts not one is left for it."""
    async with World(toy_checkpoint, max_attempts=1, block_size=4) as world:
        world.is_caching = True
        stages = world.add_all()
        content = [picture("a"), words()]
        await world.ask(content)
        stages["prefill"].kv.clear()
        response = await world.ask(content, headers={"X-Triptych-Trace": "1"})
        assert cached_tokens(response) == 0
        assert response.json()["triptych"]["attempts"] == 2
        await world.settled()


async def test_an_instance_that_always_misses_is_not_asked_for_ever(world: World) -> None:
    stages = world.add_all()

    async def miss(_request: Any) -> Any:
        raise InstanceLost("not cached", code=CACHE_MISS)

    stages["prefill"].hooks[PrefillRequest] = miss
    assert (await world.ask([picture("a"), words()])).status_code == 503
    assert len(stages["prefill"].seen) == world.settings.max_attempts + 1


async def test_a_file_that_is_taken_for_another_picture_costs_one_attempt_once(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    files = world.router._running.parts.cache.files  # type: ignore[union-attr]
    [(key, real)] = files._images.items()
    files._images.clear()
    world.index.remember(key, msgspec.structs.replace(real, mm_hash=b"?" * 32))
    for num_attempts in (2, 1):
        response = await world.ask(content, headers={"X-Triptych-Trace": "1"})
        assert response.status_code == 200, response.text
        assert response.json()["triptych"]["attempts"] == num_attempts
        assert stages["prefill"].seen[-1].images[0].image == real


async def test_what_a_dead_instance_held_is_not_believed(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    for stage in ("encoder", "prefill"):
        stages[stage].die()
        stages[stage] = world.add(f"{stage}-1", stage)
    response = await world.ask(content, headers={"X-Triptych-Trace": "1"})
    assert cached_tokens(response) == 0
    assert response.json()["triptych"]["attempts"] == 1
    assert seen(stages, "encoder", "prefill") == [1, 1]


async def test_without_redis_nothing_is_lost_nor_much_delayed(toy_checkpoint: Path) -> None:
    with listening_socket("127.0.0.1", 0) as nobody:
        index: CacheIndex = RedisIndex(f"redis://127.0.0.1:{nobody.getsockname()[1]}", "revision", 60)
        async with World(toy_checkpoint, index=index, block_size=4) as world:
            world.add_all()
            for _ in range(6):
                assert (await world.ask([picture("a"), words()])).status_code == 200
            assert index.counters.num_skipped > 0
            await world.settled()


# --- where the KV is --------------------------------------------------------------------------------------------------------


def busy(stage: FakeStage, num_pending_tokens: int, tokens_per_s: float) -> None:
    stage.loads = (StageLoad("prefill", 1, 1, num_pending_tokens, tokens_per_s),)
    stage.beat()


async def test_a_prompt_goes_where_its_kv_is(world: World) -> None:
    stages = world.add_all()
    other = world.add("a-prefill", "prefill")
    for stage in (stages["prefill"], other):
        busy(stage, 0, 1000.0)
    await world.ask(TEXT)
    holder, idle = (other, stages["prefill"]) if other.seen else (stages["prefill"], other)
    busy(holder, 3, 1000.0)  # waiting for them takes less time than pulling
    assert cached_tokens(await world.ask(TEXT)) > 0
    assert not idle.seen


async def test_a_busy_holder_is_left_for_an_idle_instance_that_pulls_its_kv(world: World) -> None:
    stages = world.add_all()
    other = world.add("a-prefill", "prefill")
    for stage in (stages["prefill"], other):
        busy(stage, 0, 1000.0)
    content = [picture("a"), words()]
    await world.ask(content)
    holder, idle = (other, stages["prefill"]) if other.seen else (stages["prefill"], other)
    busy(holder, 100_000, 1000.0)
    assert cached_tokens(await world.ask(content)) > 0
    [request] = idle.seen
    assert request.prefix.instance_id == holder.instance_id
    assert request.prefix.num_blocks * 4 < request.prompt.num_tokens
    assert len(stages["encoder"].seen) == 1
    await until(lambda: request.request_id in holder.released, "the holder lets go of what was pulled")


async def test_kv_that_pictures_rely_on_is_pulled_whatever_it_costs(world: World) -> None:
    """So fast that computing would be quicker than pulling, if only the embeddings were there."""
    stages = world.add_all()
    other = world.add("a-prefill", "prefill")
    for stage in (stages["prefill"], other):
        busy(stage, 0, 1e9)
    content = [picture("a"), words()]
    await world.ask(content)
    holder, idle = (other, stages["prefill"]) if other.seen else (stages["prefill"], other)
    busy(holder, 1 << 40, 1e9)
    assert cached_tokens(await world.ask(content)) > 0
    [request] = idle.seen
    assert request.prefix.instance_id == holder.instance_id


# --- side by side -----------------------------------------------------------------------------------------------------------


async def test_a_request_with_known_pictures_waits_for_no_encoder(world: World) -> None:
    stages = world.add_all()
    content = [picture("a"), words()]
    await world.ask(content)
    go = asyncio.Event()

    async def slow(request: EncodeRequest) -> Any:
        await go.wait()
        return await stages["encoder"].default(request)

    stages["encoder"].hooks[EncodeRequest] = slow
    gate = world.router._running.parts.gate  # type: ignore[union-attr]
    gate._width = 1.0  # as after a time without room
    waiting = [asyncio.create_task(world.ask([picture(f"new {i}"), words()])) for i in range(2)]
    await until(lambda: len(stages["encoder"].seen) == 2, "one is being encoded")
    assert cached_tokens(await world.ask(content)) > 0
    assert cached_tokens(await world.ask(TEXT)) == 0
    go.set()
    assert {(await task).status_code for task in waiting} == {200}


async def test_a_known_picture_waits_for_those_before_it_a_new_one_does_not(world: World) -> None:
    stages = world.add_all()
    await world.ask([picture("a"), words()])
    go = asyncio.Event()

    async def slow(request: PreprocessRequest) -> Any:
        if request.url is not None:
            await go.wait()
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = slow
    asking = asyncio.create_task(world.ask([at_url("slow"), picture("a"), picture("new"), words()]))
    await until(lambda: len(stages["encoder"].seen) == 2, "the new picture is encoded")
    assert stages["encoder"].seen[-1].pixels is not None
    go.set()
    assert cached_tokens(await asking) <= 4, "the block before the first picture"
    assert [request.pixels is None for request in stages["encoder"].seen].count(True) == 1


async def test_equal_pictures_of_a_request_are_encoded_once(world: World) -> None:
    stages = world.add_all()
    world.add("encoder-1", "encoder")
    assert cached_tokens(await world.ask([picture("a"), words(), picture("a"), picture("b"), picture("a")])) <= 4
    requests = [request for stage in world.all_stages for request in stage.seen if isinstance(request, EncodeRequest)]
    assert len(requests) == 4
    assert [request.pixels is None for request in requests].count(True) == 2
    assert all(placed.embeddings is not None for placed in stages["prefill"].seen[0].images)
