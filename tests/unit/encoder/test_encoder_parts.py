"""The encoder role with parts of an image that several instances divide among themselves."""

from __future__ import annotations

import asyncio

from support.fake_cluster import FakeCluster, error_of
from triptych.shared.image_info import ImageInfo

TILED = ImageInfo(b"t" * 32, 4, 4, (13, 1, 4), 26, 13)


async def test_parts_are_encoded_where_they_are_sent_from_the_same_pixels() -> None:
    cluster = FakeCluster()
    hosts = [await cluster.start(name, ["encoder"]) for name in ("e", "f")]
    source = await cluster.start("source", [])
    pixels = await cluster.put_pixels("source", 7, "r")
    parts = [TILED.part(0, 7), TILED.part(7, 6)]
    replies = await asyncio.gather(
        *(cluster.encode_image(name, "r", part, pixels) for name, part in zip("ef", parts, strict=True))
    )
    assert [reply.embeddings.shape[0] for reply in replies] == [14, 12]
    assert source.transport.usage()[2] == 1, "the pixels are still there for a part that is encoded again"
    assert [host._context.metrics.images._value.get() for host in hosts] == [1, 0], "it is one image"
    found = await hosts[0]._context.index.lookup([], [TILED.mm_hash])
    assert list(found.embeddings.values()) == [("e#0+7",)]
    for host in hosts:
        assert host.transport.usage()[2] == 1
    await cluster.release("r")
    await cluster.stop()


async def test_a_part_that_is_held_needs_no_pixels() -> None:
    cluster = FakeCluster()
    await cluster.start("e", ["encoder"])
    pixels = await cluster.put_pixels("e", 7, "r")
    part = TILED.part(3, 4)
    first = await cluster.encode_image("e", "r", part, pixels)
    again = await cluster.encode_image("e", "s", part)
    assert (first.is_cached, again.is_cached) == (False, True)
    assert again.embeddings.shape[0] == 8
    for other in (TILED, TILED.part(3, 3), TILED.part(4, 4)):
        assert (await error_of(cluster.encode_image("e", "t", other))).code == "cache_miss"
    for request_id in "rst":
        await cluster.release(request_id)
    await cluster.stop()


async def test_an_evicted_part_is_forgotten_by_the_index() -> None:
    cluster = FakeCluster(embedding_cache_bytes=26 * 2 * 4)
    host = await cluster.start("e", ["encoder"])
    for i, part in enumerate((TILED.part(0, 7), TILED.part(7, 6), TILED)):
        pixels = await cluster.put_pixels("e", 7, f"r{i}")
        await cluster.encode_image("e", f"r{i}", part, pixels)
        await cluster.release(f"r{i}")
    found = await host._context.index.lookup([], [TILED.mm_hash])
    assert list(found.embeddings.values()) == [("e",)]
    await cluster.stop()
