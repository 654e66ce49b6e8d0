"""The prefill role with prompts that begin as earlier ones, here or on another instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.fake_cluster import ROUTER, WAIT_S, FakeCluster, FakeHost, error_of, image_info, prompt_of, until
from support.fake_engine import FakeEngine, expected_tokens
from triptych.shared.messages import InstanceId, PlacedImage, PrefillReply, PrefillRequest, PrefixSource, RequestId
from triptych.shared.sampling_params import SamplingParams

PROMPT = list(range(1, 22))  # five blocks of four tokens, and one token
PICTURES = {"A": 70, "B": 71}  # what each of its tokens is in the KV
NUM_TOKENS = 6


async def start(engine: FakeEngine | None = None, **settings: Any) -> tuple[FakeCluster, FakeHost]:
    cluster = FakeCluster(**settings)
    return cluster, await cluster.start("p", ["prefill"], engine)


def request_of(
    request_id: str,
    token_ids: list[int],
    images: tuple[PlacedImage, ...] = (),
    salt: bytes = b"",
    prefix: PrefixSource | None = None,
) -> PrefillRequest:
    sampling = SamplingParams(8)
    return PrefillRequest(RequestId(request_id), ROUTER, prompt_of(token_ids), images, sampling, WAIT_S, salt, prefix)


async def ask(cluster: FakeCluster, request: PrefillRequest, name: str = "p") -> PrefillReply:
    """Computes one prompt and forgets it."""
    reply = await cluster.prefill(name, request)
    await cluster.release(request.request_id)
    return reply


def pictures_prompt(first: int, names: str) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Token ids, what the KV holds, offsets of the images."""
    token_ids, slots, offsets = [first, 2, 3], [first, 2, 3], []
    for name in names:
        offsets.append(len(token_ids))
        token_ids += [*[0] * NUM_TOKENS, 4, 5]
        slots += [*[PICTURES[name]] * NUM_TOKENS, 4, 5]
    return [*token_ids, 6, 7, 8], [*slots, 6, 7, 8], tuple(offsets)


async def placed(cluster: FakeCluster, request_id: str, names: str, offsets: tuple[int, ...]) -> tuple[PlacedImage, ...]:
    transport = cluster.hosts[InstanceId("p")].transport
    images = []
    for name, offset in zip(names, offsets, strict=True):
        tensor = torch.full((NUM_TOKENS, 2), float(PICTURES[name]))
        ref = await transport.put(tensor, RequestId(request_id), 60.0)
        images.append(PlacedImage(image_info(NUM_TOKENS, picture=name), offset, ref))
    return tuple(images)


def without_embeddings(names: str, offsets: tuple[int, ...]) -> tuple[PlacedImage, ...]:
    images = zip(names, offsets, strict=True)
    return tuple(PlacedImage(image_info(NUM_TOKENS, picture=name), offset) for name, offset in images)


async def test_a_prompt_that_was_here_is_not_computed_again() -> None:
    cluster, host = await start()
    replies = [await ask(cluster, request_of(f"r{i}", PROMPT)) for i in range(2)]
    assert [reply.first_token for reply in replies] == expected_tokens(PROMPT, 0, 1) * 2
    assert [reply.num_cached_tokens for reply in replies] == [0, 20]
    assert host.engine.steps == [[("r0", 21)], [("r1", 1)]]
    longer = [*PROMPT, 50, 51, 52, 53]
    reply = await ask(cluster, request_of("longer", longer))
    assert (reply.first_token, reply.num_cached_tokens) == (expected_tokens(longer, 0, 1)[0], 20)
    found = await host._context.index.lookup(host._context.prefixes.chain_of(PROMPT, [], b"").keys, [])  # type: ignore[union-attr]
    assert dict(found.prefixes) == {"p": 5}
    stats = host.report().resources.kv_prefixes  # type: ignore[union-attr]
    assert stats is not None
    assert (stats.num_hits, stats.num_misses, stats.num_entries) == (10, 6, 6)
    await cluster.stop()


async def test_prompts_that_come_together_are_computed_once() -> None:
    """Four that begin alike, the first of them in two steps."""
    cluster, host = await start(max_prefill_tokens=11)
    host.engine.gate.clear()
    prompts = [[*PROMPT, 30 + i] for i in range(4)]
    tasks = [asyncio.create_task(ask(cluster, request_of(f"r{i}", prompt))) for i, prompt in enumerate(prompts)]
    await until(lambda: host.role.load().num_running == 4, "all are admitted")
    host.engine.gate.set()
    replies = await asyncio.gather(*tasks)
    assert [reply.first_token for reply in replies] == [expected_tokens(prompt, 0, 1)[0] for prompt in prompts]
    assert [reply.num_cached_tokens for reply in replies] == [0, 20, 20, 20]
    assert sum(size for step in host.engine.steps for _, size in step) == 22 + 3 * 2
    await cluster.stop()


async def test_the_last_token_is_always_computed() -> None:
    cluster, host = await start()
    for request_id in ("a", "b"):
        reply = await ask(cluster, request_of(request_id, PROMPT[:20]))
        assert [reply.first_token] == expected_tokens(PROMPT[:20], 0, 1)
    assert host.engine.steps == [[("a", 20)], [("b", 4)]]
    await cluster.stop()


async def test_nothing_is_shared_across_salts() -> None:
    cluster, _ = await start()
    salts = (b"", b"x", b"y", b"x")
    replies = [await ask(cluster, request_of(f"r{i}", PROMPT, salt=salt)) for i, salt in enumerate(salts)]
    assert [reply.num_cached_tokens for reply in replies] == [0, 0, 0, 20]
    await cluster.stop()


async def test_nothing_is_kept_without_a_cache() -> None:
    cluster, host = await start(policy="static")
    for i in range(2):
        reply = await ask(cluster, request_of(f"r{i}", PROMPT))
        assert reply.num_cached_tokens == 0
        assert reply.kv is not None
        assert reply.kv.block_keys == reply.kv.key_tail == b""
    assert host.pool.num_free == host.pool.num_blocks
    await cluster.stop()


async def test_images_that_are_covered_need_no_embeddings() -> None:
    cluster, host = await start()
    token_ids, slots, offsets = pictures_prompt(1, "AB")
    await ask(cluster, request_of("a", token_ids, await placed(cluster, "a", "AB", offsets)))
    reply = await ask(cluster, request_of("b", token_ids, without_embeddings("AB", offsets)))
    assert [reply.first_token] == expected_tokens(slots, 2, 1)
    assert reply.num_cached_tokens == 20
    gone = tuple(
        PlacedImage(image.image, image.offset, image.embeddings) for image in await placed(cluster, "c", "AB", offsets)
    )
    await cluster.release("c")
    again = await ask(cluster, request_of("d", token_ids, gone))
    assert again.first_token == reply.first_token, "what is covered is not even pulled"
    assert host.transport.usage()[2] == 0
    await cluster.stop()


@pytest.mark.parametrize(("names", "first"), [("BA", 1), ("AA", 1), ("AB", 9)])
async def test_another_prompt_with_the_same_images_is_another(names: str, first: int) -> None:
    """Another order, one of them twice, another text before them: nothing of the second image is covered."""
    cluster, host = await start()
    token_ids, _, offsets = pictures_prompt(1, "AB")
    await ask(cluster, request_of("a", token_ids, await placed(cluster, "a", "AB", offsets)))
    token_ids, slots, offsets = pictures_prompt(first, names)
    error = await error_of(ask(cluster, request_of("b", token_ids, without_embeddings(names, offsets))))
    assert (error.kind, error.code) == ("instance_lost", "cache_miss")
    assert host.report().resources.kv_prefixes.num_stale > 0  # type: ignore[union-attr]
    reply = await ask(cluster, request_of("c", token_ids, await placed(cluster, "c", names, offsets)))
    assert [reply.first_token] == expected_tokens(slots, 2, 1)
    assert reply.num_cached_tokens == (8 if names == "AA" else 0)
    await cluster.release("b")
    await cluster.stop()


async def test_our_own_embeddings_stand_in_for_evicted_kv() -> None:
    cluster = FakeCluster()
    host = await cluster.start("p", ["encoder", "prefill"])
    image = image_info(NUM_TOKENS, picture="A")
    pixels = await cluster.put_pixels("p", 7, "a")
    encoded = await cluster.encode_image("p", "a", image, pixels)
    await cluster.release("a")
    value = int(host._context.embeddings.find(image)[0, 0])  # type: ignore[index]
    reply = await ask(cluster, request_of("b", [1, *[0] * NUM_TOKENS, 2], (PlacedImage(image, 1),)))
    assert [reply.first_token] == expected_tokens([1, *[value] * NUM_TOKENS, 2], 1, 1)
    assert encoded.embeddings.shape == (NUM_TOKENS, 2)
    await cluster.stop()


async def test_a_small_pool_evicts_what_was_used_least_recently() -> None:
    """Twelve blocks; prompts of five and a bit, of which two are asked for again and again."""
    cluster, host = await start(FakeEngine(12))
    for i in range(20):
        for first in (1, 100 + 40 * i):
            prompt = [first + k for k in range(21)]
            reply = await ask(cluster, request_of(f"r{i}-{first}", prompt))
            assert [reply.first_token] == expected_tokens(prompt, 0, 1)
            assert reply.num_cached_tokens == (20 if first == 1 and i else 0)
    stats = host.report().resources.kv_prefixes  # type: ignore[union-attr]
    assert stats is not None
    assert stats.num_evicted > 50
    await cluster.stop()


async def test_a_beginning_is_pulled_from_a_peer() -> None:
    """The peer has all five blocks, the instance itself the first two."""
    cluster, host = await start()
    peer = await cluster.start("q", ["prefill"])
    await ask(cluster, request_of("a", PROMPT), "q")
    await ask(cluster, request_of("b", [*PROMPT[:8], 99]))
    reply = await ask(cluster, request_of("c", PROMPT, prefix=PrefixSource(InstanceId("q"), 5)))
    assert (reply.first_token, reply.num_cached_tokens) == (expected_tokens(PROMPT, 0, 1)[0], 20)
    assert host.engine.steps[-1] == [("c", 1)]
    assert host._context.metrics.kv_pulls._value.get() == 1
    await cluster.until_at_rest("q")
    assert peer.pool.num_cached == 5
    reply = await ask(cluster, request_of("d", PROMPT, prefix=PrefixSource(InstanceId("q"), 5)))
    assert reply.num_cached_tokens == 20
    assert host._context.metrics.kv_pulls._value.get() == 1, "it has them now"
    await cluster.stop()


async def test_the_index_hears_of_a_pulled_beginning_when_it_is_kept() -> None:
    """Not before: the request may leave, and then it never is."""
    cluster, host = await start()
    await cluster.start("peer", ["prefill"])
    await ask(cluster, request_of("a", PROMPT), "peer")
    context = host._context
    chain = context.prefixes.chain_of(PROMPT, [], b"")
    assert chain is not None
    host.engine.gate.clear()
    pulling = asyncio.create_task(cluster.prefill("p", request_of("b", PROMPT, prefix=PrefixSource(InstanceId("peer"), 5))))
    await until(host.engine.is_inside.is_set, "it is in a step")
    assert (await context.index.lookup(chain.keys, [])).prefixes == {}
    host.engine.gate.set()
    assert (await pulling).num_cached_tokens == 20
    assert (await context.index.lookup(chain.keys, [])).prefixes == {"p": 5}
    await cluster.release("b")
    await cluster.stop()


@pytest.mark.parametrize("what", ["gone", "nothing there", "another layout"])
async def test_a_peer_that_has_nothing_is_no_harm(what: str) -> None:
    cluster, host = await start()
    peer = await cluster.start("q", ["prefill"], FakeEngine(layout="other" if what == "another layout" else "fake"))
    if what == "another layout":
        await ask(cluster, request_of("a", PROMPT), "q")
    if what == "gone":
        await peer.stop()
        del cluster.hosts[InstanceId("q")], cluster.bus.hosts[InstanceId("q")]
    reply = await ask(cluster, request_of("r", PROMPT, prefix=PrefixSource(InstanceId("q"), 5)))
    assert [reply.first_token] == expected_tokens(PROMPT, 0, 1)
    assert host.engine.steps == [[("r", 21)]]
    await cluster.stop()
