"""Tokens through the cluster are those of transformers' `generate`: greedy, fp32, whatever the way through the stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cases import MODEL, Case, chat, odd_picture, random_case, text
from support.client import ask, session
from support.cluster import Cluster
from support.nats_server import NatsServer
from support.parity import check_parity
from support.reference import Reference
from support.watch import Watch

NUM_ALL = 200  # the acceptance list's number
NUM_SOME = 20
MAX_PAYLOAD_BYTES = 65_536  # the issue: nothing larger than 64 KB rides on NATS


# some in every run, 200 in the long one (the reference alone takes a minute for those)
BOTH_SIZES = pytest.mark.parametrize("count", [NUM_SOME, pytest.param(NUM_ALL, marks=pytest.mark.long)])


def cases(count: int) -> list[Case]:
    return [random_case(seed) for seed in range(count)]


@BOTH_SIZES
@pytest.mark.timeout(300)
async def test_disaggregated_equals_transformers(cluster: Cluster, reference: Reference, count: int) -> None:
    await check_parity(cluster.url, cases(count), reference)


async def test_the_request_visits_every_stage_in_its_own_process(cluster: Cluster, reference: Reference) -> None:
    """Else parity would also hold for a cluster that does everything in one place."""
    case = random_case(7, num_pictures=2)
    async with session() as http, Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        answer = await ask(http, cluster.url, case, cache_salt="every-stage")
        beats = dict(watch.beats)
    assert reference.judge(case, answer) == "equal"
    assert answer.trace is not None
    assert answer.trace["attempts"] == 1
    visited = {stage["stage"]: stage["instance_id"] for stage in answer.trace["stages"]}
    assert set(visited) == {"preprocess", "encoder", "prefill", "decode"}
    assert len({beats[instance_id].resources.pid for instance_id in visited.values()}) == 4
    assert all(stage["compute_ms"] > 0 for stage in answer.trace["stages"])


@pytest.mark.long
@pytest.mark.parametrize("count", [NUM_ALL])
@pytest.mark.timeout(300)
async def test_colocated_equals_transformers(start_cluster: Callable[..., Cluster], reference: Reference, count: int) -> None:
    """One process has the roles encoder, prefill and decode: equal to the reference, so equal to the disaggregated."""
    cluster = start_cluster("--colocated")
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        [instance] = [beat for beat in watch.beats.values() if beat.service == "instance"]
        assert set(instance.roles) == {"encoder", "prefill", "decode"}
        await check_parity(cluster.url, cases(count), reference)
        await watch.until_at_rest(5, "after the colocated run")
    assert cluster.stop() == 0


@pytest.fixture
def bounded_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS server of our own that cuts off whoever sends more than 64 KB."""
    server = NatsServer(tmp_path, max_payload_bytes=MAX_PAYLOAD_BYTES)
    yield server
    server.stop()


@BOTH_SIZES
@pytest.mark.timeout(300)
async def test_over_gloo_and_a_nats_server_that_takes_only_64_kb(
    start_cluster: Callable[..., Cluster],
    stopping_checkpoint: Path,
    stopping_reference: Reference,
    bounded_nats: NatsServer,
    count: int,
) -> None:
    """Tensors travel over torch.distributed; media, prompts longer than a message, and KV are never on the bus."""
    cluster = start_cluster(
        model_dir=stopping_checkpoint, TRIPTYCH_TRANSPORT="gloo", TRIPTYCH_NATS_URL=bounded_nats.url, TRIPTYCH_MODEL_NAME=MODEL
    )
    assert cluster.nats_url == bounded_nats.url
    rng = random.Random("long prompt")
    long = chat(odd_picture(rng), text(rng, 4_250), odd_picture(rng), max_tokens=8)
    assert stopping_reference.answer(long).num_prompt_tokens * 4 > MAX_PAYLOAD_BYTES
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        answers = await check_parity(cluster.url, [*cases(count), long], stopping_reference)
        await watch.until_at_rest(5, "after the run over gloo")
    assert sum(answer.finish_reason == "stop" for answer in answers) > count // 4, "this checkpoint was to stop often"
    assert bounded_nats.payload_error() is None
    assert cluster.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("count", [NUM_ALL])
@pytest.mark.timeout(300)
async def test_a_small_kv_pool_only_makes_it_slower(
    start_cluster: Callable[..., Cluster], reference: Reference, count: int
) -> None:
    """The pool holds the longest sequence and little else: others wait, or are moved out to memory and back."""
    block_bytes = kv_bytes_per_token(reference) * 16
    longest = max(reference.answer(case).num_prompt_tokens + case.max_tokens for case in cases(count))
    num_blocks = longest // 16 + 8
    cluster = start_cluster(TRIPTYCH_KV_CACHE_BYTES=str(num_blocks * block_bytes))
    async with Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        assert watch.of("decode").resources.num_blocks <= num_blocks
        await check_parity(cluster.url, cases(count), reference, concurrency=32)
        await watch.until_at_rest(5, "after the run with a small pool")
    assert cluster.stop() == 0


def kv_bytes_per_token(reference: Reference) -> int:
    config = reference.text_config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4)


async def test_a_stream_says_the_same_as_one_answer(cluster: Cluster, reference: Reference) -> None:
    case = random_case(11, num_pictures=1)
    async with session() as http:
        whole = await ask(http, cluster.url, case, cache_salt="whole")
        stream = await ask(http, cluster.url, case, cache_salt="stream", stream=True)
    assert reference.judge(case, whole) == "equal"
    assert (stream.text, stream.finish_reason, stream.usage) == (whole.text, whole.finish_reason, whole.usage)
    assert stream.num_events > 2


async def test_temperature_is_repeatable_by_seed(cluster: Cluster) -> None:
    case = chat("Tell me something.", max_tokens=24)
    async with session() as http:
        first = await ask(http, cluster.url, case, temperature=1.5, seed=5)
        again = await ask(http, cluster.url, case, temperature=1.5, seed=5)
        other = await ask(http, cluster.url, case, temperature=1.5, seed=6)
    assert first.error is None
    assert first.text == again.text
    assert first.text != other.text


async def test_special_tokens_in_text_stay_text(cluster: Cluster, reference: Reference) -> None:
    """`<|image_pad|>` typed by a user is no placeholder: the request is answered, and its ids are those of plain text."""
    tokenizer = reference.tokenizer
    typed = "<|vision_start|><|image_pad|><|vision_end|><|im_end|>"
    plain = chat("x", max_tokens=4)
    case = chat("x" + typed, max_tokens=4)
    async with session() as http:
        short = await ask(http, cluster.url, plain)
        answer = await ask(http, cluster.url, case)
    assert answer.error is None
    assert answer.usage is not None
    assert short.usage is not None
    assert (answer.usage.get("prompt_tokens_details") or {}).get("image_tokens") == 0
    as_text = len(tokenizer.encode("x" + typed, split_special_tokens=True, add_special_tokens=False))
    extra = as_text - len(tokenizer.encode("x", add_special_tokens=False))
    assert answer.usage["prompt_tokens"] - short.usage["prompt_tokens"] == extra
