"""Pictures whose encoding the router divides among encoders. No model here has tiles: the stages are those without a model, and
preprocess says that pictures have thirteen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fake_stages import ANSWER, FakeStage, World, picture, until, words
from triptych.shared.errors import InstanceLost, InternalError, Overloaded
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import StageLoad
from triptych.shared.messages import EncodeRequest, PreprocessReply, PreprocessRequest

NUM_TILES, TILE_TOKENS = 13, 16
TRACE = {"X-Triptych-Trace": "1"}


class Tiled:
    """A world with so many encoders, idle ones of equal pace, whose pictures have tiles."""

    def __init__(self, world: World, num_encoders: int) -> None:
        self.world = world
        self.preprocess = world.add("preprocess-0", "preprocess")
        self.encoders = [world.add(f"encoder-{i}", "encoder") for i in range(num_encoders)]
        self.prefill = world.add("prefill-0", "prefill")
        self.decode = world.add("decode-0", "decode")
        self.preprocess.hooks[PreprocessRequest] = self.cut
        for encoder in self.encoders:
            self.load(encoder, "encoder", 160.0)  # ten tiles a second
        self.load(self.prefill, "prefill", 1e6)

    def load(self, stage: FakeStage, name: str, tokens_per_s: float, num_pending_tokens: int = 0) -> None:
        stage.loads = (StageLoad(name, num_pending_tokens=num_pending_tokens, tokens_per_s=tokens_per_s),)
        stage.beat()

    async def cut(self, request: PreprocessRequest) -> PreprocessReply:
        reply = self.preprocess.preprocess(request)
        one = reply.image
        image = ImageInfo(one.mm_hash, 56, 56, (NUM_TILES, 1, 9), NUM_TILES * TILE_TOKENS, NUM_TILES)
        if reply.pixels is None:  # known already
            return reply
        self.world.known[self.preprocess.media.get(request.media_id or "") or str(request.url).encode()] = image
        return PreprocessReply(image, reply.pixels, reply.time)

    @property
    def encoded(self) -> list[tuple[str, int | None, int]]:
        """Encoder, first tile and tiles, in the order of the prompt."""
        asked = [(one.name, request.image) for one in self.encoders for request in one.seen]
        return sorted(((name, image.first_piece, image.num_pieces) for name, image in asked), key=lambda one: one[1] or 0)

    def placed(self, number: int = -1) -> list[tuple[int | None, int, int]]:
        """First tile, tiles and offset of what prefill got."""
        images = self.prefill.seen[number].images
        return [(one.image.first_piece, one.image.num_pieces, one.offset) for one in images]


@pytest.fixture
def world(caching_world: World) -> World:
    return caching_world


def succeeded(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ANSWER
    return body


async def test_a_picture_is_divided_and_put_together(world: World) -> None:
    tiled = Tiled(world, 4)
    body = succeeded(await world.ask([words(), picture("a"), words()], headers=TRACE))
    assert Counter(name for name, _, _ in tiled.encoded) == {f"encoder-{i}": 1 for i in range(4)}
    assert [(first, num) for _, first, num in tiled.encoded] == [(0, 3), (3, 3), (6, 3), (9, 4)]
    begin = tiled.placed()[0][2]
    assert tiled.placed() == [(first, num, begin + TILE_TOKENS * (first or 0)) for _, first, num in tiled.encoded]
    assert all(one.embeddings is not None for one in tiled.prefill.seen[0].images)
    assert len({request.pixels for one in tiled.encoders for request in one.seen}) == 1
    stages = [row for row in body["triptych"]["stages"] if row["stage"] == "encoder"]
    assert sorted(row["instance_id"] for row in stages) == [one.instance_id for one in tiled.encoders]
    assert all("of 13 pieces" in row["reason"] for row in stages)
    await until(lambda: bool(tiled.preprocess.released), "the pixels are let go of")


async def test_other_policies_and_pictures_without_tiles_are_left_whole(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, stage_wait_s=1.0, policy="modserve") as world:
        tiled = Tiled(world, 4)
        succeeded(await world.ask([picture("a")]))
        assert [(first, num) for _, first, num in tiled.encoded] == [(None, NUM_TILES)]
        await world.settled()
    async with World(toy_checkpoint, stage_wait_s=1.0) as world:
        tiled = Tiled(world, 4)
        del tiled.preprocess.hooks[PreprocessRequest]
        succeeded(await world.ask([picture("a")]))
        assert [(first, num) for _, first, num in tiled.encoded] == [(None, 1)]
        await world.settled()


async def test_busy_encoders_are_left_alone(world: World) -> None:
    tiled = Tiled(world, 3)
    tiled.load(tiled.encoders[0], "encoder", 160.0, num_pending_tokens=1000)
    succeeded(await world.ask([picture("a")]))
    assert {name for name, _, _ in tiled.encoded} == {"encoder-1", "encoder-2"}


async def test_parts_that_are_held_are_not_encoded_again(world: World) -> None:
    tiled = Tiled(world, 2)

    async def asked_again(text: str) -> list[list[bool]]:
        """The same picture after another text: by encoder, whether it got pixels."""
        world.index.drop(tiled.prefill.instance_id, "kv", tiled.prefill.kv)
        tiled.prefill.kv.clear()
        seen = [len(one.seen) for one in tiled.encoders]
        succeeded(await world.ask([words(text), picture("a")]))
        return [
            sorted(request.pixels is not None for request in one.seen[num:])
            for one, num in zip(tiled.encoders, seen, strict=True)
        ]

    assert await asked_again("one") == [[True], [True]]
    assert await asked_again("two") == [[False], [False]]
    tiled.encoders[1].embeddings.clear()
    assert await asked_again("three") == [[False, True], [False]], "what was missing was encoded, and nothing else"
    assert [one[:2] for one in tiled.placed(0)] == [one[:2] for one in tiled.placed(2)]


async def test_a_part_that_is_lost_goes_elsewhere_alone(world: World) -> None:
    """From the same pixels: they are still where they were."""
    tiled = Tiled(world, 3)
    dying = tiled.encoders[1]

    async def die(_request: EncodeRequest) -> Any:
        dying.die()
        await asyncio.Event().wait()

    dying.hooks[EncodeRequest] = die
    body = succeeded(await world.ask([picture("a")], headers=TRACE))
    assert body["triptych"]["attempts"] == 1
    assert len(tiled.preprocess.seen) == 1
    assert len(tiled.encoded) == 4
    lost, again = (request for one in tiled.encoders for request in one.seen if request.image == dying.seen[0].image)
    assert lost.pixels == again.pixels


async def test_lost_pixels_are_made_again_once_for_all_parts(world: World) -> None:
    tiled = Tiled(world, 3)

    def lose(stage: FakeStage) -> Any:
        async def encode(request: EncodeRequest) -> Any:
            if request.pixels is not None and request.pixels.tensor_id == "pixels-1":
                await until(lambda: len(tiled.encoded) >= 3, "all have their share")
                raise InstanceLost("gone", code="tensor_gone")
            return await stage.default(request)

        return encode

    for one in tiled.encoders:
        one.hooks[EncodeRequest] = lose(one)
    body = succeeded(await world.ask([picture("a")], headers=TRACE))
    assert body["triptych"]["attempts"] == 1
    assert len(tiled.preprocess.seen) == 2
    assert len(tiled.encoded) == 6


async def test_a_part_that_is_lost_each_time_names_its_picture(world: World) -> None:
    tiled = Tiled(world, 3)

    def lose(stage: FakeStage) -> Any:
        async def encode(request: EncodeRequest) -> Any:
            if request.image.first_piece == 0 and request.image.mm_hash == bad:
                raise InstanceLost("gone", code="tensor_gone")
            return await stage.default(request)

        return encode

    succeeded(await world.ask([picture("bad")]))
    bad = tiled.encoders[0].seen[0].image.mm_hash
    world.index.drop(tiled.prefill.instance_id, "kv", tiled.prefill.kv)
    for one in tiled.encoders:
        one.die()
    tiled.encoders = [world.add(f"other-{i}", "encoder") for i in range(3)]
    for one in tiled.encoders:
        one.hooks[EncodeRequest] = lose(one)
    response = await world.ask([words("x"), picture("good"), picture("bad")])
    assert response.status_code == 503, response.text
    error = response.json()["error"]
    assert error["param"] == "messages.[0].content.[2].image_url"
    assert "image 2" in error["message"]


async def test_a_picture_that_breaks_an_encoder_is_named(world: World) -> None:
    tiled = Tiled(world, 2)

    async def fail(_request: EncodeRequest) -> Any:
        raise InternalError("encoding the image failed")

    for one in tiled.encoders:
        one.hooks[EncodeRequest] = fail
    response = await world.ask([words("x"), picture("a")])
    assert response.status_code == 500
    assert response.json()["error"]["param"] == "messages.[0].content.[1].image_url"


async def test_whoever_refuses_a_share_is_passed_over(world: World) -> None:
    tiled = Tiled(world, 2)

    async def refuse(_request: EncodeRequest) -> Any:
        raise Overloaded("full")

    tiled.encoders[1].hooks[EncodeRequest] = refuse
    succeeded(await world.ask([picture("a")]))
    assert [request.image.num_pieces for request in tiled.encoders[0].seen] in ([7, 6], [6, 7])


async def test_a_prompt_goes_ahead_of_parts_that_are_missing(world: World) -> None:
    tiled = Tiled(world, 2)
    tiled.load(tiled.prefill, "prefill", 160.0)
    tiled.load(tiled.encoders[1], "encoder", 160.0, num_pending_tokens=4 * TILE_TOKENS)
    go = {True: asyncio.Event(), False: asyncio.Event()}  # the first part's, the other's

    async def wait(request: EncodeRequest) -> Any:
        await go[request.image.first_piece == 0].wait()
        return await tiled.encoders[0].default(request)

    for one in tiled.encoders:
        one.hooks[EncodeRequest] = wait
    asking = asyncio.create_task(world.ask([words(), picture("a"), words()]))
    await until(lambda: bool(tiled.prefill.seen), "the prompt is at prefill")
    assert [one.is_awaited for one in tiled.prefill.seen[0].images] == [True, True]
    for num_told, is_first in ((1, False), (2, True)):
        go[is_first].set()
        await until(lambda n=num_told: len(tiled.prefill.told) == n, "a part landed")  # type: ignore[misc]
    assert [one.index for one in tiled.prefill.told] == [1, 0]
    succeeded(await asking)


async def test_equal_pictures_are_encoded_once_in_the_same_parts(world: World) -> None:
    tiled = Tiled(world, 2)
    succeeded(await world.ask([picture("a"), words(), picture("a")]))
    assert [request.pixels is None for one in tiled.encoders for request in one.seen] == [False, True] * 2
    parts = [one[:2] for one in tiled.placed()]
    assert parts[:2] == parts[2:]
