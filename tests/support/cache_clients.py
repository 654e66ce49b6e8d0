"""Clients of a FakeCluster that do what a router does, at random: prompts that share beginnings and pictures, and what must be
answered to each.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import torch

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, image_info, prompt_of
from support.fake_engine import BLOCK_SIZE, embedding_of, expected_tokens
from triptych.cache.block_keys import ImagePlace
from triptych.shared.errors import CACHE_MISS, InstanceLost
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import (
    EmbeddingsReady,
    InstanceId,
    PlacedImage,
    PrefillRequest,
    PrefixSource,
    RequestId,
    Role,
    TensorRef,
)
from triptych.shared.sampling_params import SamplingParams

PICTURES = {1: 3, 2: 5, 3: 9}  # by pixel value, the number of tokens
PLACEMENTS: dict[str, dict[str, list[Role]]] = {
    "colocated": {"all": ["encoder", "prefill", "decode"]},
    "stages": {"e": ["encoder"], "p": ["prefill"], "d": ["decode"]},
    "text apart": {"e": ["encoder"], "t": ["prefill", "decode"], "u": ["prefill", "decode"]},
    "prompts apart": {"e": ["encoder", "prefill"], "f": ["encoder", "prefill"], "d": ["decode"]},
}


@dataclass
class Prompt:
    """images: picture and offset. slots: what the KV holds."""

    token_ids: list[int]
    slots: list[int]
    images: list[tuple[int, int]]
    max_tokens: int
    salt: bytes

    def places(self) -> list[ImagePlace]:
        return [ImagePlace(info(picture).mm_hash, offset, PICTURES[picture]) for picture, offset in self.images]

    def expected(self) -> list[int]:
        return expected_tokens(self.slots, len(self.images), self.max_tokens)


def info(picture: int) -> ImageInfo:
    return image_info(PICTURES[picture], picture=f"{picture}")


def random_prompt(rng: random.Random) -> Prompt:
    """One of two beginnings, up to three of three pictures, few different words between them."""
    token_ids = list(rng.choice(([7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9], [5, 5])))
    slots, images = list(token_ids), []
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        picture = rng.choice(sorted(PICTURES))
        images.append((picture, len(token_ids)))
        words = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        token_ids += [*[0] * PICTURES[picture], *words]
        slots += [*[embedding_of(torch.full((4, 4, 3), picture))] * PICTURES[picture], *words]
    words = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    return Prompt(token_ids + words, slots + words, images, rng.randrange(2, 30), rng.choice((b"", b"", b"x")))


@dataclass(frozen=True, slots=True)
class Told:
    """What the index says of a prompt, right or wrong: who has blocks of it, and of how many tokens the KV is held, whose
    pictures are left out."""

    source: PrefixSource | None = None
    num_covered: int = 0


class Client:
    """What a router does with one request: it trusts what the instances say that they hold, or not; it lets prefill begin
    before all images are encoded, or not."""

    def __init__(self, cluster: FakeCluster, placement: dict[str, list[Role]], rng: random.Random) -> None:
        self.cluster, self.placement, self.rng = cluster, placement, rng

    def choose(self, role: Role) -> str:
        return self.rng.choice([name for name, roles in self.placement.items() if role in roles])

    async def run(self, name: str, prompt: Prompt) -> None:
        await asyncio.sleep(self.rng.random() / 20)
        is_trusting, does_overlap = self.rng.random() < 0.5, self.rng.random() < 0.5
        for attempt in range(2):
            request_id, prefill = f"{name}-{attempt}", self.choose("prefill")
            told = self.told(prompt, prefill, is_trusting and attempt == 0)
            try:
                output = await self.attempt(request_id, prompt, prefill, told, does_overlap)
            except InstanceLost as error:
                if error.code != CACHE_MISS or attempt > 0:
                    raise
                continue
            finally:
                await self.cluster.release(request_id)
            assert output == prompt.expected()
            return

    def told(self, prompt: Prompt, prefill: str, is_trusting: bool) -> Told:
        """What is true now."""
        held = {name: self.num_held(name, prompt) for name in self.placement}
        best = max(held, key=lambda name: held[name])
        source = PrefixSource(InstanceId(best), held[best]) if best != prefill and held[best] else None
        return Told(source, BLOCK_SIZE * held[best] if is_trusting else 0)

    async def attempt(
        self, request_id: str, prompt: Prompt, prefill: str, told: Told, does_overlap: bool, slack_s: float | None = None
    ) -> list[int]:
        needed = [i for i, (picture, at) in enumerate(prompt.images) if at + PICTURES[picture] > told.num_covered]
        refs = {} if does_overlap else dict(zip(needed, await self.encode_all(request_id, prompt, needed), strict=True))
        images = tuple(
            PlacedImage(info(picture), offset, refs.get(i), is_awaited=does_overlap and i in needed)
            for i, (picture, offset) in enumerate(prompt.images)
        )
        request = PrefillRequest(
            RequestId(request_id), ROUTER, prompt_of(prompt.token_ids), images, SamplingParams(prompt.max_tokens),
            WAIT_S, prompt.salt, told.source, slack_s,
        )  # fmt: skip
        answer = asyncio.create_task(self.cluster.generate(prefill, self.choose("decode"), request))
        try:
            if does_overlap:
                await asyncio.sleep(0)
                landing = (self.land(request_id, prefill, prompt, i) for i in self.rng.sample(needed, len(needed)))
                await asyncio.gather(*landing)
            return await answer
        finally:
            answer.cancel()

    def num_held(self, name: str, prompt: Prompt) -> int:
        prefixes = self.cluster.hosts[InstanceId(name)]._context.prefixes
        chain = prefixes.chain_of(prompt.token_ids, prompt.places(), prompt.salt)
        return 0 if chain is None else prefixes.num_held(chain.keys[: (len(prompt.token_ids) - 1) // BLOCK_SIZE])

    async def encode_all(self, request_id: str, prompt: Prompt, needed: list[int]) -> list[TensorRef]:
        return list(await asyncio.gather(*(self.encode(request_id, prompt.images[i][0]) for i in needed)))

    async def encode(self, request_id: str, picture: int) -> TensorRef:
        name = self.choose("encoder")
        pixels = await self.cluster.put_pixels(name, picture, request_id)
        return (await self.cluster.encode_image(name, request_id, info(picture), pixels)).embeddings

    async def land(self, request_id: str, prefill: str, prompt: Prompt, index: int) -> None:
        ready = EmbeddingsReady(RequestId(request_id), index, await self.encode(request_id, prompt.images[index][0]))
        try:
            await self.cluster.bus.request(InstanceId(prefill), ready, WAIT_S)
        except InstanceLost as error:  # the prompt ended before: another of its images was not covered after all
            if error.code != "request_released":
                raise
