"""The order in which the encoder serves pictures: that of the policy, also where their pixels have to wait."""

from __future__ import annotations

import asyncio
from typing import Any

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, FakeHost, error_of, image_info, until
from triptych.shared.errors import InternalError
from triptych.shared.messages import EncodeRequest, InstanceId, RequestId, TensorRef

NUM_TOKENS = 3
LAX_S, URGENT_S = 60.0, 5.0


class Queue:
    """Requests for pictures at one encoder, which encodes them one by one. done: those that are answered, in that order."""

    def __init__(self, cluster: FakeCluster, host: FakeHost) -> None:
        self.cluster, self.host = cluster, host
        self.tasks: list[asyncio.Task[Any]] = []
        self.done: list[str] = []

    @classmethod
    async def start(cls) -> Queue:
        """The engine waits within the first one's call; the pixels of another one are in hand."""
        cluster = FakeCluster(max_encode_tokens=NUM_TOKENS)
        queue = cls(cluster, await cluster.start("e", ["encoder"]))
        queue.host.engine.gate.clear()
        await queue.ask("first", 1, LAX_S)
        await until(queue.host.engine.is_inside.is_set, "it is encoded")
        await queue.ask("in hand", 2, LAX_S)
        return queue

    async def ask(
        self, name: str, picture: int, slack_s: float | None, pixels: TensorRef | None = None, num_pictures: int = 1
    ) -> None:
        """Returns when it waits. num_pictures: of the request."""
        pixels = pixels or await self.cluster.put_pixels("e", picture, name)
        image = image_info(NUM_TOKENS, picture=f"{picture}")
        request = EncodeRequest(RequestId(name), ROUTER, image, pixels, WAIT_S, slack_s, num_pictures * NUM_TOKENS)
        task = asyncio.create_task(self.cluster.bus.request(InstanceId("e"), request, WAIT_S))
        task.add_done_callback(lambda _: self.done.append(name))
        self.tasks.append(task)
        await until(lambda: self.host.role._num_requests == len(self.tasks), f"{name} waits")

    async def finish(self) -> None:
        self.host.engine.gate.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for name in self.done:
            await self.cluster.release(name)
        await self.cluster.stop()


async def test_an_urgent_picture_passes_those_whose_pixels_are_not_in_hand_yet() -> None:
    queue = await Queue.start()
    for i in range(6):
        await queue.ask(f"lax {i}", 10 + i, LAX_S)
    await queue.ask("urgent", 3, URGENT_S)
    await queue.finish()
    assert queue.done == ["first", "in hand", "urgent", *(f"lax {i}" for i in range(6))]


async def test_a_picture_is_as_urgent_as_the_most_urgent_that_waits_for_it() -> None:
    queue = await Queue.start()
    await queue.ask("a", 10, LAX_S)
    await queue.ask("b", 11, LAX_S)
    await queue.ask("b again", 11, URGENT_S)
    await queue.ask("a again", 10, None)
    await queue.ask("b once more", 11, LAX_S)
    await queue.finish()
    assert queue.done[:2] == ["first", "in hand"]
    assert set(queue.done[2:5]) == {"b", "b again", "b once more"}


async def test_without_targets_a_small_request_passes_the_pictures_of_a_large_one() -> None:
    queue = await Queue.start()
    queue.host.role._batch.rate.note(100, 10.0)
    for i in range(3):
        await queue.ask(f"large {i}", 10 + i, None, num_pictures=8)
    await queue.ask("small", 3, None)
    await queue.ask("small too", 12, None)
    await queue.finish()
    assert queue.done[:2] == ["first", "in hand"]
    assert set(queue.done[2:4]) == {"large 2", "small too"}, "a picture that a small one waits for, too, is as small"
    assert queue.done[4:] == ["small", "large 0", "large 1"]


async def test_pixels_that_cannot_be_had_are_only_their_own_request_s_fault(monkeypatch: Any) -> None:
    """Whatever is wrong with those of the first one: the second one has its own."""
    queue = await Queue.start()
    get = queue.host.transport.get
    bad = await queue.cluster.put_pixels("e", 10, "bad")

    def refuse(ref: TensorRef) -> Any:
        if ref.tensor_id == bad.tensor_id:
            raise InternalError("the puller expects another shape", code="tensor_mismatch")
        return get(ref)

    monkeypatch.setattr(queue.host.transport, "get", refuse)
    await queue.ask("bad", 10, None, bad)
    await queue.ask("good", 10, None)
    queue.host.engine.gate.set()
    assert (await error_of(queue.tasks[2])).code == "tensor_mismatch"
    assert (await queue.tasks[3]).embeddings.shape == (NUM_TOKENS, 2)
    await queue.finish()
