"""The encoder role: batches, bounds, embeddings, cancellation, faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.fake_cluster import FakeCluster, FakeHost, error_of, until
from support.fake_engine import FakeEngine, embedding_of
from triptych.shared.messages import TensorRef


async def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("e", ["encoder"], engine)


def is_quick(host: FakeHost) -> None:
    """It has encoded so many tokens a second that a batch is never too long."""
    host.role._batch.rate.note(1_000_000, 1.0)


async def test_pixels_become_leased_embeddings() -> None:
    cluster, host = await start()
    await cluster.start("pre", [])
    pixels = await cluster.put_pixels("pre", 17, "r")
    reply = await cluster.encode("e", "r", pixels, num_tokens=5)
    assert reply.embeddings.shape == (5, 2)
    assert reply.time.stage == "encoder"
    assert reply.time.compute_s > 0
    stored = host.transport.get(reply.embeddings)
    assert stored.tolist() == [[float(embedding_of(torch.full((4, 4, 3), 17)))] * 2] * 5
    await cluster.until_at_rest("pre")
    await cluster.release("r")
    await cluster.stop()


async def test_images_that_wait_share_a_batch_up_to_the_bound() -> None:
    cluster, host = await start(max_encode_tokens=10)
    is_quick(host)
    host.engine.gate.clear()
    tasks = []
    for i in range(6):
        pixels = await cluster.put_pixels("e", i, f"r{i}")
        tasks.append(asyncio.create_task(cluster.encode("e", f"r{i}", pixels, num_tokens=4)))
        await until(host.engine.is_inside.is_set, "the first runs")
    await until(lambda: len(host.role._batch._queue) >= 2, "others wait")
    host.engine.gate.set()
    await asyncio.gather(*tasks)
    assert host.engine.encodes[0] == 1
    assert max(host.engine.encodes) == 2
    for i in range(6):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_where_encoding_takes_long_each_image_goes_alone() -> None:
    """A batch would be no quicker, and its first image not there before the last."""
    cluster, host = await start(max_encode_tokens=10)
    host.engine.gate.clear()
    tasks = []
    for i in range(4):
        pixels = await cluster.put_pixels("e", i, f"r{i}")
        tasks.append(asyncio.create_task(cluster.encode("e", f"r{i}", pixels, num_tokens=2)))
    await until(lambda: len(host.role._batch._queue) == 3, "others wait")
    host.role._batch.rate.note(1, 1.0)
    host.engine.gate.set()
    await asyncio.gather(*tasks)
    assert host.engine.encodes == [1, 1, 1, 1]
    for i in range(4):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_pulled_pixels_are_bounded() -> None:
    """Twice the batch's tokens are in hand; the rest stay with their owner."""
    cluster, host = await start(max_encode_tokens=10)
    is_quick(host)
    host.engine.gate.clear()
    tasks = []
    for i in range(12):
        pixels = await cluster.put_pixels("e", i, f"r{i}")
        tasks.append(asyncio.create_task(cluster.encode("e", f"r{i}", pixels, num_tokens=5)))
    await until(lambda: host.role.load().num_waiting + host.role.load().num_running == 12, "all are here")
    await until(host.engine.is_inside.is_set, "the first run")
    await until(lambda: len(host.role._batch._queue) + len(host.role._batch._batch) == 4, "four are pulled")
    assert host.role.load().num_pending_tokens == 60
    host.engine.gate.set()
    await asyncio.gather(*tasks)
    for i in range(12):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_an_image_larger_than_a_batch_goes_alone() -> None:
    cluster, host = await start(max_encode_tokens=4)
    replies = await asyncio.gather(
        *[cluster.encode("e", f"r{n}", await cluster.put_pixels("e", 1, f"r{n}"), num_tokens=n) for n in (50, 3)]
    )
    assert [reply.embeddings.shape[0] for reply in replies] == [50, 3]
    assert host.engine.encodes == [1, 1]
    for n in (50, 3):
        await cluster.release(f"r{n}")
    await cluster.stop()


async def test_a_poison_image_fails_alone() -> None:
    engine = FakeEngine()
    engine.poison = {3}
    cluster, host = await start(engine)
    is_quick(host)
    host.engine.gate.clear()
    tasks = []
    for i in range(6):
        pixels = await cluster.put_pixels("e", i, f"r{i}")
        tasks.append(asyncio.create_task(cluster.encode("e", f"r{i}", pixels)))
        await until(host.engine.is_inside.is_set, "the first runs")
    await until(lambda: len(host.role._batch._queue) == 5, "others wait")
    host.engine.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(result, "code", None) for result in results] == [None, None, None, "internal", None, None]
    assert host.engine.encodes == [1, 5, 1, 1, 1, 1, 1]
    for i in range(6):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_release_at_each_point() -> None:
    """One image is being encoded, one is pulled and waits, one waits to be pulled."""
    cluster, host = await start(max_encode_tokens=2)
    host.engine.gate.clear()
    tasks = []
    for i in range(3):
        pixels = await cluster.put_pixels("e", i, f"r{i}")
        tasks.append(asyncio.create_task(error_of(cluster.encode("e", f"r{i}", pixels, num_tokens=2))))
    await until(lambda: len(host.role._batch._queue) == 1 and len(host.role._batch._batch) == 1, "each is where it should be")
    for i in range(3):
        await cluster.release(f"r{i}")
    assert [error.code for error in await asyncio.gather(*tasks)] == ["request_released"] * 3
    host.engine.gate.set()
    await cluster.stop()


async def test_the_deadline() -> None:
    cluster, host = await start()
    host.engine.gate.clear()
    pixels = await cluster.put_pixels("e", 1, "r")
    error = await error_of(cluster.encode("e", "r", pixels, timeout_s=0.02))
    assert (error.code, error.status) == ("timeout", 504)
    host.engine.gate.set()
    await cluster.release("r")
    await cluster.stop()


async def test_lost_pixels_are_told_as_instance_lost() -> None:
    cluster, host = await start()
    pixels = await cluster.put_pixels("e", 1, "r")
    host.transport.release(pixels.tensor_id)
    assert (await error_of(cluster.encode("e", "r", pixels))).kind == "instance_lost"
    await cluster.stop()


async def test_pixels_of_another_size_are_refused() -> None:
    cluster, _ = await start()
    pixels = await cluster.put_pixels("e", 1, "r", size=8)
    wrong = type(pixels)(**({n: getattr(pixels, n) for n in pixels.__struct_fields__} | {"dtype": "float32"}))
    assert (await error_of(cluster.encode("e", "r", wrong))).kind == "internal"
    await cluster.release("r")
    await cluster.stop()


async def test_waiting_images_are_bounded() -> None:
    cluster, host = await start(max_waiting=1)
    host.engine.gate.clear()
    pixels = [await cluster.put_pixels("e", i, f"r{i}") for i in range(3)]
    first = asyncio.create_task(cluster.encode("e", "r0", pixels[0]))
    await until(host.engine.is_inside.is_set, "one runs")
    second = asyncio.create_task(cluster.encode("e", "r1", pixels[1]))
    await until(lambda: host.role.load().num_waiting == 1, "one waits")
    assert (await error_of(cluster.encode("e", "r2", pixels[2]))).code == "overloaded"
    host.engine.gate.set()
    await asyncio.gather(first, second)
    for i in range(3):
        await cluster.release(f"r{i}")
    await cluster.stop()


async def test_a_full_store_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.shared.transport.store.PUT_WAIT_S", 0.02)
    cluster, _ = await start(tensor_store_bytes=1 << 16, embedding_cache_bytes=0)
    pixels = await cluster.put_pixels("e", 1, "r")
    error = await error_of(cluster.encode("e", "r", pixels, num_tokens=100_000))
    assert error.kind == "overloaded"
    await cluster.release("r")
    await cluster.stop()


async def test_while_the_store_is_full_no_more_images_are_pulled() -> None:
    """Room for the embeddings of one; two more are encoded and wait for room, the fourth stays with its owner."""
    cluster, host = await start(tensor_store_bytes=1 << 16, max_encode_tokens=5000, embedding_cache_bytes=0)
    owner = await cluster.start("pre", [])
    tasks = []
    is_seen = asyncio.Event()

    async def encode_then_release(i: int, pixels: TensorRef) -> None:
        """Whichever got the room gives it to the next: which one that is, is open."""
        await cluster.encode("e", f"r{i}", pixels, num_tokens=5000)
        await is_seen.wait()
        await cluster.release(f"r{i}")

    for i in range(4):
        pixels = await cluster.put_pixels("pre", i, f"r{i}")
        tasks.append(asyncio.create_task(encode_then_release(i, pixels)))
    await until(lambda: host.transport._store._room.num_waiting == 2, "two wait for room")
    await until(lambda: owner.transport.usage()[2] == 1, "what was pulled is released")
    for _ in range(100):
        await asyncio.sleep(0)
    assert owner.transport.usage()[2] == 1
    is_seen.set()
    await asyncio.gather(*tasks)
    await cluster.stop()
