"""The prefill role with images that come while the prompt is computed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, FakeHost, error_of, image_info, prompt_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.shared.messages import (
    Accepted,
    EmbeddingsReady,
    InstanceId,
    PlacedImage,
    PrefillRequest,
    RequestId,
    TensorRef,
)
from triptych.shared.sampling_params import SamplingParams

P = InstanceId("p")
NUM_TOKENS = 6
OFFSETS = (3, 11, 20)
PROMPT = [1, 2, 3, *[0] * 6, 4, 5, *[0] * 6, 6, 7, 8, *[0] * 6, 9]
SLOTS = [1, 2, 3, *[70] * 6, 4, 5, *[71] * 6, 6, 7, 8, *[72] * 6, 9]


async def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("p", ["prefill"], engine)


def awaiting(request_id: str = "r", here: dict[int, TensorRef] | None = None) -> PrefillRequest:
    """Three images, 70 to 72. here: those that are encoded already."""
    images = tuple(
        PlacedImage(image_info(NUM_TOKENS, picture=f"{i}"), offset, (here or {}).get(i), is_awaited=i not in (here or {}))
        for i, offset in enumerate(OFFSETS)
    )
    return PrefillRequest(RequestId(request_id), ROUTER, prompt_of(PROMPT), images, SamplingParams(8), WAIT_S)


async def embeddings(cluster: FakeCluster, index: int, request_id: str = "r") -> TensorRef:
    tensor = torch.full((NUM_TOKENS, 2), 70.0 + index)
    return await cluster.hosts[P].transport.put(tensor, RequestId(request_id), 60.0)


async def land(cluster: FakeCluster, index: int, request_id: str = "r") -> None:
    ready = EmbeddingsReady(RequestId(request_id), index, await embeddings(cluster, index, request_id))
    assert isinstance(await cluster.bus.request(P, ready, WAIT_S), Accepted)


def num_computed(host: FakeHost, request_id: str = "r") -> int:
    return sum(size for step in host.engine.steps for id, size in step if id == request_id)


async def test_a_prompt_is_computed_up_to_its_first_missing_image() -> None:
    cluster, host = await start()
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await until(lambda: num_computed(host) == 3, "the text before the first image")
    await land(cluster, 1)
    await land(cluster, 0)
    await until(lambda: num_computed(host) == 20, "two images and the text after them")
    await until(lambda: host.role.load().num_pending_tokens == len(PROMPT) - 20, "the end of that step")
    await land(cluster, 2)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    assert num_computed(host) == len(PROMPT)
    await cluster.release("r")
    await cluster.stop()


async def test_images_may_land_in_any_order_and_twice() -> None:
    cluster, _ = await start()
    request = awaiting(here={1: await embeddings(cluster, 1)})
    task = asyncio.create_task(cluster.prefill("p", request))
    await until(lambda: RequestId("r") in cluster.hosts[P].role._jobs, "the request is known")
    for index in (2, 0, 0):
        await land(cluster, index)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    assert (await error_of(land(cluster, 1))).code == "request_released"
    await cluster.release("r")
    await cluster.stop()


async def test_others_pass_a_prompt_that_waits_for_its_images() -> None:
    """Neither its place in the queue nor its blocks keep them: it has seven of ten, and the text needs all."""
    cluster, host = await start(FakeEngine(10))
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await until(lambda: num_computed(host) == 3, "it waits for an image")
    text = await cluster.prefill("p", text_request("text", list(range(38)), 1))
    assert [text.first_token] == expected_tokens(list(range(38)), 0, 1)
    for index in range(3):
        await land(cluster, index)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    await cluster.release("r")
    await cluster.stop()


async def test_what_is_awaited_takes_no_room_before_it_comes() -> None:
    cluster, host = await start()
    budget = host.role._in_hand
    budget.capacity = host.engine.embedding_bytes * 2 * NUM_TOKENS  # two of three images
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await until(lambda: num_computed(host) == 3, "it waits for an image")
    here = {i: await embeddings(cluster, i, "other") for i in range(len(OFFSETS))}
    other = await cluster.prefill("p", awaiting("other", here))
    assert [other.first_token] == expected_tokens(SLOTS, 3, 1)
    for index in range(3):
        await land(cluster, index)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    for request_id in ("r", "other"):
        await cluster.release(request_id)
    await cluster.stop()
    assert budget.num_held == 0


async def test_prompts_that_share_too_little_room_end_all_the_same() -> None:
    cluster, host = await start()
    budget = host.role._in_hand
    budget.capacity = host.engine.embedding_bytes * 2 * NUM_TOKENS
    names = ("r", "s", "t")
    tasks = [asyncio.create_task(cluster.prefill("p", awaiting(name))) for name in names]
    await until(lambda: len(host.role._jobs) == 3, "all are known")
    for index in range(3):
        for name in names:
            await land(cluster, index, name)
    for task in tasks:
        assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    for name in names:
        await cluster.release(name)
    await cluster.stop()
    assert budget.num_held == 0


async def test_a_parked_prompt_goes_on_with_what_is_still_cached() -> None:
    cluster, host = await start(FakeEngine(12))
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await land_when_known(cluster, host)
    await until(lambda: num_computed(host) == 11, "it waits for the second image")
    await cluster.prefill("p", text_request("text", [5] * 24, 1))
    assert host.pool.num_used == 0, "it is parked"
    for index in (1, 2):
        await land(cluster, index)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    assert num_computed(host) == len(PROMPT) + 11 % 4, "no more than its unfinished block is computed again"
    await cluster.release("r")
    await cluster.stop()


async def test_decode_work_that_waits_gets_the_blocks_of_a_prompt_that_waits_for_an_image() -> None:
    """Nothing else happens there that would have the prompt looked at."""
    cluster = FakeCluster()
    host = await cluster.start("p", ["prefill", "decode"], FakeEngine(10))
    await cluster.start("q", ["prefill"])
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await until(lambda: num_computed(host) == 3 and host.pool.num_used == 7, "it waits with its blocks")
    text = list(range(1, 14))
    assert await cluster.generate("q", "p", text_request("text", text)) == expected_tokens(text, 0, 8)
    for index in range(3):
        await land(cluster, index)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    for request_id in ("r", "text"):
        await cluster.release(request_id)
    await cluster.stop()


async def land_when_known(cluster: FakeCluster, host: FakeHost) -> None:
    await until(lambda: RequestId("r") in host.role._jobs, "the request is known")
    await land(cluster, 0)


async def test_an_image_that_is_gone_ends_its_prompt() -> None:
    cluster, _ = await start()
    task = asyncio.create_task(error_of(cluster.prefill("p", awaiting())))
    await until(lambda: RequestId("r") in cluster.hosts[P].role._jobs, "the request is known")
    ref = await embeddings(cluster, 0)
    cluster.hosts[P].transport.release(ref.tensor_id)
    await cluster.bus.request(P, EmbeddingsReady(RequestId("r"), 0, ref), WAIT_S)
    assert (await task).code == "tensor_gone"
    await cluster.release("r")
    await cluster.stop()


@pytest.mark.parametrize("index", [-1, 3])
async def test_an_image_that_was_never_announced_is_refused(index: int) -> None:
    cluster, _ = await start()
    task = asyncio.create_task(error_of(cluster.prefill("p", awaiting())))
    await until(lambda: RequestId("r") in cluster.hosts[P].role._jobs, "the request is known")
    ready = EmbeddingsReady(RequestId("r"), index, await embeddings(cluster, 0))
    assert (await error_of(cluster.bus.request(P, ready, WAIT_S))).code == "invalid_message"
    await cluster.release("r")
    assert (await task).code == "request_released"
    await cluster.stop()


async def test_a_model_whose_text_attends_to_all_images_waits_for_all() -> None:
    engine = FakeEngine()
    engine.attends_to_all = True
    cluster, host = await start(engine)
    task = asyncio.create_task(cluster.prefill("p", awaiting()))
    await until(lambda: RequestId("r") in host.role._jobs, "the request is known")
    for index in (0, 1):
        await land(cluster, index)
    await cluster.prefill("p", text_request("text", [5], 1))
    assert num_computed(host) == 0
    await land(cluster, 2)
    assert [(await task).first_token] == expected_tokens(SLOTS, 3, 1)
    await cluster.release("r")
    await cluster.stop()
