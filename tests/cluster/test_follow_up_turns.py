"""The second, text-only turn of a picture chat goes on where the first one left its KV: none of it moves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import aiohttp

from support.cases import Case, ChatMessage, chat, picture, text
from support.client import Answer, ask, session
from support.cluster import Cluster
from support.reference import Reference
from support.watch import Watch

NUM_CHATS = 3


def next_turn(case: Case, answer: Answer, asked: str) -> Case:
    return Case((*case.messages, ChatMessage("assistant", (answer.text,)), ChatMessage("user", (asked,))), case.max_tokens)


def places(answer: Answer) -> dict[str, str]:
    """Instance by stage."""
    assert answer.trace is not None, answer
    return {row["stage"]: row["instance_id"] for row in answer.trace["stages"]}


async def total(watch: Watch, metric: str) -> float:
    return sum((await watch.values_of(f"triptych_{metric}_total")).values())


async def two_turns(http: aiohttp.ClientSession, watch: Watch, url: str, case: Case, **fields: Any) -> dict[Case, Answer]:
    """Asks a chat's first turn and its second, and compares their ways."""
    first = await ask(http, url, case, **fields)
    follow_up = next_turn(case, first, "And what else is there to see in it?")
    num_moved, num_follow_ups = await total(watch, "kv_bytes_moved"), await total(watch, "follow_ups")
    assert num_moved > 0
    second = await ask(http, url, follow_up, **fields)
    at = places(first)["decode"]
    assert places(second) == {"prefill": at, "decode": at}
    assert await total(watch, "kv_bytes_moved") == num_moved
    assert await total(watch, "follow_ups") == num_follow_ups + 1
    return {case: first, follow_up: second}


async def test_a_second_turn_moves_no_kv_and_says_what_transformers_says(cluster: Cluster, reference: Reference) -> None:
    rng = random.Random("follow-up turns")
    cases = [chat(picture(rng, 280, 224), text(rng, 20), max_tokens=24) for _ in range(NUM_CHATS)]
    async with session() as http, Watch(cluster.nats_url) as watch:
        await watch.until_complete()
        for chat_case in cases:
            for case, answer in (await two_turns(http, watch, cluster.url, chat_case)).items():
                verdict = reference.judge(case, answer)
                assert not verdict.startswith("wrong"), verdict


async def test_it_stays_in_its_group(tmp_path: Path) -> None:
    """Of emulated instances, half of which are for text."""
    args = ["--emulate", "a100", "--time-scale", "10", "--instances", "8", "--elastic", "off", "--policy", "elasticmm"]
    cluster = Cluster(Path("qwen2.5-vl-7b"), tmp_path / "run", args)
    try:
        rng = random.Random("follow-up turns")
        async with session() as http, Watch(cluster.nats_url) as watch:
            await watch.until_complete()
            case = chat(picture(rng, 448, 448), "What is it?")
            _, answer = (await two_turns(http, watch, cluster.url, case, model="qwen2.5-vl-7b", ignore_eos=True)).values()
            groups = {name: beat.group for name, beat in watch.living().items() if beat.service == "instance"}
            assert groups[places(answer)["decode"]] == "multimodal"
            assert list(groups.values()).count("text") == 4
    finally:
        assert cluster.stop() == 0
