"""The prefill role and the prefix cache when things go wrong: holders that hang, a wrong index, prompts that are cut off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Seq

import pytest
import torch

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, error_of, image_info, prompt_of, text_request, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.cache.block_keys import ImagePlace
from triptych.services.prefill import prefix_pull
from triptych.shared.engine.api import Chunk
from triptych.shared.messages import InstanceId, PlacedImage, PrefillRequest, PrefixSource, RequestId
from triptych.shared.sampling_params import SamplingParams

PROMPT = list(range(1, 22))  # five blocks of four tokens, and one token
PICTURE = image_info(8, picture="A")


class Stepwise(FakeEngine):
    """Computes one step for each permit. num_begun: steps, the last of which may wait for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.num_begun = 0

    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        self.num_begun += 1
        assert self.permits.acquire(timeout=WAIT_S)
        return super().run(chunks)


def request_of(
    request_id: str, token_ids: list[int], images: tuple[PlacedImage, ...] = (), prefix: PrefixSource | None = None
) -> PrefillRequest:
    sampling = SamplingParams(8)
    return PrefillRequest(RequestId(request_id), ROUTER, prompt_of(token_ids), images, sampling, WAIT_S, prefix=prefix)


async def test_a_holder_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_pull, "ANSWER_TIMEOUT_S", 0.02)
    cluster = FakeCluster(transfer_timeout_s=2 * WAIT_S)
    await cluster.start("p", ["prefill"])

    async def hang(message: object) -> None:
        await asyncio.Event().wait()

    cluster.bus.hosts[InstanceId("q")] = hang
    reply = await cluster.prefill("p", request_of("r", PROMPT, prefix=PrefixSource(InstanceId("q"), 5)))
    assert [reply.first_token] == expected_tokens(PROMPT, 0, 1)
    await cluster.release("r")
    await cluster.stop()


async def test_what_the_index_says_in_vain_it_says_once() -> None:
    """It named an instance for the KV of a picture, which was therefore left out, and not encoded."""
    cluster = FakeCluster()
    host = await cluster.start("p", ["prefill"])
    token_ids = [1, 2, *[0] * PICTURE.num_tokens, 3, 4, 5]
    await cluster.prefill("p", text_request("other", [1, 2, 3, 4, 5]))
    chain = host._context.prefixes.chain_of(token_ids, [ImagePlace(PICTURE.mm_hash, 2, PICTURE.num_tokens)], b"")
    assert chain is not None
    index = host._context.index
    index.hold(InstanceId("p"), "kv", chain.keys)
    assert (await index.lookup(chain.keys, [])).prefixes == {"p": 3}
    request = request_of("r", token_ids, (PlacedImage(PICTURE, 2),))
    assert (await error_of(cluster.prefill("p", request))).code == "cache_miss"
    assert not (await index.lookup(chain.keys, [])).prefixes
    assert host._context.prefixes.num_stale == 3
    for request_id in ("r", "other"):
        await cluster.release(request_id)
    await cluster.stop()


async def test_what_a_prompt_had_computed_when_it_was_cut_off_is_kept() -> None:
    """In its third step of five tokens: ten tokens are two blocks and a half."""
    cluster, engine = FakeCluster(max_prefill_tokens=5), Stepwise()
    host = await cluster.start("p", ["prefill"], engine)
    cut_off = asyncio.create_task(error_of(cluster.prefill("p", request_of("cut off", PROMPT))))
    engine.permits.release(2)
    await until(lambda: engine.num_begun == 3, "it is in the third")
    await cluster.release("cut off")
    assert (await cut_off).code == "request_released"
    engine.permits.release(100)
    await cluster.until_at_rest("p")
    assert host.pool.num_cached == 2
    reply = await cluster.prefill("p", request_of("again", PROMPT))
    assert [reply.first_token] == expected_tokens(PROMPT, 0, 1)
    assert reply.num_cached_tokens == 8
    await cluster.release("again")
    await cluster.stop()


async def test_what_was_computed_of_an_image_that_was_taken_away_is_not_kept() -> None:
    """Its request is released, and with it the embeddings, which the engine reads at that moment."""
    cluster, engine = FakeCluster(), Stepwise()
    host = await cluster.start("p", ["prefill"], engine)
    token_ids = [1, 2, *[0] * PICTURE.num_tokens, 3, 4, 5]
    places = {}
    for name in ("cut off", "again"):
        ref = await host.transport.put(torch.full((PICTURE.num_tokens, 2), 70.0), RequestId(name), 60.0)
        places[name] = (PlacedImage(PICTURE, 2, ref),)
    lease = host.transport._store._leases[places["cut off"][0].embeddings.tensor_id]
    memory = host.transport._store.tensor(lease)
    cut_off = asyncio.create_task(error_of(cluster.prefill("p", request_of("cut off", token_ids, places["cut off"]))))
    await until(lambda: engine.num_begun == 1, "it is computed")
    await cluster.release("cut off")
    assert (await cut_off).code == "request_released"
    memory.fill_(0.0)
    engine.permits.release(100)
    await until(lambda: host.pool.num_used == 0, "the step has ended")
    assert host.pool.num_cached == 0
    reply = await cluster.prefill("p", request_of("again", token_ids, places["again"]))
    slots = [1, 2, *[70] * PICTURE.num_tokens, 3, 4, 5]
    assert [reply.first_token] == expected_tokens(slots, 1, 1)
    await cluster.release("again")
    await cluster.stop()
