"""The prefill role with an image that comes in parts, each from the encoder that encoded it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, FakeHost, error_of, prompt_of, until
from support.fake_engine import expected_tokens
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import EmbeddingsReady, InstanceId, PlacedImage, PrefillRequest, RequestId, TensorRef
from triptych.shared.sampling_params import SamplingParams

P = InstanceId("p")
OFFSET = 3
TILED = ImageInfo(b"t" * 32, 4, 4, (6, 1, 4), 12, 6)
PROMPT = [1, 2, 3, *[0] * 12, 4, 5, 6]
SLOTS = [1, 2, 3, *[70] * 12, 4, 5, 6]


@dataclass
class Prefill:
    cluster: FakeCluster
    host: FakeHost

    @classmethod
    async def start(cls) -> Prefill:
        cluster = FakeCluster()
        return cls(cluster, await cluster.start("p", ["prefill"]))

    async def embeddings(self, image: ImageInfo, request_id: str) -> TensorRef:
        return await self.host.transport.put(torch.full((image.num_tokens, 2), 70.0), RequestId(request_id), 60.0)  # type: ignore[no-any-return]

    async def first_token(self, request: PrefillRequest) -> tuple[int, int]:
        """And how many tokens were cached."""
        reply = await self.cluster.prefill("p", request)
        await self.cluster.release(request.request_id)
        return reply.first_token, reply.num_cached_tokens

    @property
    def num_computed(self) -> int:
        return sum(size for step in self.host.engine.steps for _, size in step)


def request_of(request_id: str, *images: PlacedImage) -> PrefillRequest:
    return PrefillRequest(RequestId(request_id), ROUTER, prompt_of(PROMPT), images, SamplingParams(8), WAIT_S)


def part(first: int, num: int, embeddings: TensorRef | None = None, **given: Any) -> PlacedImage:
    return PlacedImage(TILED.part(first, num), OFFSET + 2 * first, embeddings, **given)


async def test_parts_are_the_image() -> None:
    """The same tokens, under the same keys, in whichever parts it came."""
    prefill = await Prefill.start()
    sizes = [((0, 6),), ((0, 2), (2, 4)), ((0, 1), (1, 1), (2, 4))]
    for number, ranges in enumerate(sizes):
        parts = [part(*one, await prefill.embeddings(TILED.part(*one), f"r{number}")) for one in ranges]
        token = await prefill.first_token(request_of(f"r{number}", *parts))
        assert token == (expected_tokens(SLOTS, 1, 1)[0], 16 if number else 0)
    assert await prefill.first_token(request_of("known", PlacedImage(TILED, OFFSET))) == (expected_tokens(SLOTS, 1, 1)[0], 16)
    await prefill.cluster.stop()


async def test_a_prompt_is_computed_up_to_its_first_missing_part() -> None:
    prefill = await Prefill.start()
    parts = [part(first, 2, is_awaited=True) for first in (0, 2, 4)]
    task = asyncio.create_task(prefill.first_token(request_of("r", *parts)))
    for index, num_computed in ((1, 3), (0, 11), (2, 18)):
        await until(lambda: RequestId("r") in prefill.host.role._jobs, "the request is known")
        ready = EmbeddingsReady(RequestId("r"), index, await prefill.embeddings(parts[index].image, "r"))
        await prefill.cluster.bus.request(P, ready, WAIT_S)
        await until(lambda n=num_computed: prefill.num_computed == n, f"{num_computed} tokens")  # type: ignore[misc]
    assert await task == (expected_tokens(SLOTS, 1, 1)[0], 0)
    await prefill.cluster.stop()


@pytest.mark.parametrize(
    "parts",
    [
        (part(2, 4, is_awaited=True),),
        (part(0, 2, is_awaited=True), part(4, 2, is_awaited=True)),
        (part(0, 2, is_awaited=True), PlacedImage(TILED.part(2, 4), OFFSET + 5, is_awaited=True)),
        (PlacedImage(ImageInfo(b"o" * 32, 4, 4, (2, 1, 4), 4, 2), OFFSET, is_awaited=True), part(2, 4, is_awaited=True)),
    ],
    ids=["no beginning", "a gap", "text between", "of another image"],
)
async def test_parts_that_make_no_image_are_refused(parts: tuple[PlacedImage, ...]) -> None:
    prefill = await Prefill.start()
    assert (await error_of(prefill.cluster.prefill("p", request_of("r", *parts)))).code == "invalid_message"
    await prefill.cluster.stop()
