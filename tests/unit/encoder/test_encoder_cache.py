"""The encoder role with a picture that it has seen, or is about to have seen."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from support.fake_cluster import FakeCluster, FakeHost, error_of, image_info, until
from support.fake_engine import embedding_of

NUM_TOKENS = 3
PICTURE_BYTES = NUM_TOKENS * 2 * 4


async def start(**settings: Any) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("e", ["encoder"])


async def encoded(cluster: FakeCluster, request_id: str, picture: int, has_pixels: bool = True) -> Any:
    pixels = await cluster.put_pixels("e", picture, request_id) if has_pixels else None
    return await cluster.encode_image("e", request_id, image_info(NUM_TOKENS, picture=f"{picture}"), pixels)


def expected(picture: int) -> list[list[float]]:
    return [[float(embedding_of(torch.full((4, 4, 3), picture)))] * 2] * NUM_TOKENS


async def test_a_picture_is_encoded_once() -> None:
    cluster, host = await start()
    prefill = await cluster.start("p", [])
    replies = [await encoded(cluster, f"r{i}", 7, has_pixels=i < 2) for i in range(3)]
    assert [reply.is_cached for reply in replies] == [False, True, True]
    assert host.engine.encodes == [1]
    assert host._context.metrics.images._value.get() == 1
    assert host._context.metrics.pixel_transfers._value.get() == 1
    for reply in replies:
        assert host.transport.get(reply.embeddings).tolist() == expected(7), "ours, without a copy"
        assert (await prefill._context.pull(reply.embeddings)).tolist() == expected(7), "a peer's copy"
    found = await host._context.index.lookup([], [image_info(NUM_TOKENS, picture="7").mm_hash])
    assert list(found.embeddings.values()) == [("e",)]
    for i in range(3):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_what_is_not_held_is_a_miss() -> None:
    cluster, host = await start()
    error = await error_of(encoded(cluster, "r", 7, has_pixels=False))
    assert (error.kind, error.code) == ("instance_lost", "cache_miss")
    assert host.report().resources.embeddings.num_stale == 1  # type: ignore[union-attr]
    await cluster.stop()


async def test_nothing_is_kept_without_a_cache() -> None:
    cluster, host = await start(policy="static")
    host.engine.gate.clear()
    tasks = [asyncio.create_task(encoded(cluster, f"r{i}", 7)) for i in range(2)]
    await until(lambda: host.role.load().num_pending_tokens == 2 * NUM_TOKENS, "both are here")
    host.engine.gate.set()
    assert not any(reply.is_cached for reply in await asyncio.gather(*tasks))
    assert not (await encoded(cluster, "r2", 7)).is_cached
    assert sum(host.engine.encodes) == 3
    for i in range(3):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_requests_for_one_picture_share_its_encoding() -> None:
    """The first one leaves meanwhile, and takes its pixels with it."""
    cluster, host = await start()
    host.engine.gate.clear()
    tasks = [asyncio.create_task(encoded(cluster, f"r{i}", 7)) for i in range(4)]
    await until(lambda: host.role.load().num_running == 4, "all wait for it")
    assert host.role.load().num_pending_tokens == NUM_TOKENS
    await cluster.release("r0")
    host.engine.gate.set()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(reply, "code", None) for reply in replies] == ["request_released", None, None, None]
    assert host.engine.encodes == [1]
    for reply in replies[1:]:
        assert host.transport.get(reply.embeddings).tolist() == expected(7)  # type: ignore[union-attr]
    for i in range(4):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_pixels_of_our_own_end_with_their_request_and_the_encoding_goes_on() -> None:
    """Others' pixels are copied when they are pulled; these lie where another picture may be a moment later."""
    cluster, host = await start()
    host.engine.gate.clear()
    first = asyncio.create_task(error_of(encoded(cluster, "first", 7)))
    await until(host.engine.is_inside.is_set, "it is in a step")
    image = image_info(NUM_TOKENS, picture="7")
    elsewhere = await cluster.start("preprocess", [])
    second = asyncio.create_task(
        cluster.encode_image("e", "second", image, await cluster.put_pixels("preprocess", 7, "second"))
    )
    await until(lambda: host.role._num_requests == 2, "another one waits for it")
    await cluster.release("first")
    await cluster.put_pixels("e", 8, "third")
    host.engine.gate.set()
    assert (await first).code == "request_released"
    assert (await elsewhere._context.pull((await second).embeddings)).tolist() == expected(7)
    for request_id in ("second", "third"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_whose_pixels_are_lost_does_not_matter_to_others() -> None:
    cluster, host = await start(max_encode_tokens=2)
    host.engine.gate.clear()
    first = asyncio.create_task(encoded(cluster, "first", 1))
    await until(host.engine.is_inside.is_set, "another picture is encoded")
    lost = await cluster.put_pixels("e", 7, "lost")
    image = image_info(NUM_TOKENS, picture="7")
    loser = asyncio.create_task(error_of(cluster.encode_image("e", "lost", image, lost)))
    await until(lambda: host.role.load().num_pending_tokens == 2 * NUM_TOKENS, "it waits for its pixels' turn")
    others = [asyncio.create_task(encoded(cluster, f"r{i}", 7)) for i in range(3)]
    await until(lambda: host.role._num_requests == 5, "others wait with it")
    host.transport.release(lost.tensor_id)
    host.engine.gate.set()
    assert (await loser).code == "tensor_gone"
    replies = await asyncio.gather(*others)
    await first
    assert sum(host.engine.encodes) == 2
    assert all(host.transport.get(reply.embeddings).tolist() == expected(7) for reply in replies)
    for request_id in ("first", "lost", "r0", "r1", "r2"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_a_picture_that_nobody_waits_for_is_not_encoded() -> None:
    cluster, host = await start(max_encode_tokens=2)
    host.engine.gate.clear()
    first = asyncio.create_task(encoded(cluster, "first", 1))
    await until(host.engine.is_inside.is_set, "another picture is encoded")
    tasks = [asyncio.create_task(error_of(encoded(cluster, f"r{i}", 7))) for i in range(2)]
    await until(lambda: host.role._num_requests == 3, "two wait")
    for i in range(2):
        await cluster.release(f"r{i}")
    assert [error.code for error in await asyncio.gather(*tasks)] == ["request_released"] * 2
    host.engine.gate.set()
    await first
    assert host.engine.encodes == [1]
    await cluster.release("first")
    await cluster.stop()


async def test_the_pool_is_bounded_and_keeps_what_is_leased() -> None:
    """Room for two: the leased one stays, the third one takes the other's place; with two leased another one is only copied."""
    cluster, host = await start(embedding_cache_bytes=2 * PICTURE_BYTES)
    index = host._context.index
    leased = await encoded(cluster, "a", 1)
    for request_id, picture in (("b", 2), ("c", 3)):
        await encoded(cluster, request_id, picture)
        await cluster.release(request_id)
    mm_hashes = [image_info(NUM_TOKENS, picture=f"{picture}").mm_hash for picture in (1, 2, 3)]
    assert set((await index.lookup([], mm_hashes)).embeddings) == {mm_hashes[0], mm_hashes[2]}
    await encoded(cluster, "d", 3, has_pixels=False)
    copied = await encoded(cluster, "e", 4)
    stats = host.report().resources.embeddings  # type: ignore[union-attr]
    assert stats is not None
    assert (stats.num_bytes, stats.num_entries, stats.num_evicted) == (2 * PICTURE_BYTES, 2, 1)
    assert host.transport.get(leased.embeddings).tolist() == expected(1)
    assert host.transport.get(copied.embeddings).tolist() == expected(4)
    for request_id in ("a", "d", "e"):
        await cluster.release(request_id)
    await cluster.stop()
