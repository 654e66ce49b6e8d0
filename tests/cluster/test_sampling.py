"""Sampling and log probabilities through the whole cluster, with the OpenAI SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from support.cases import MODEL, random_case
from support.cluster import Cluster
from support.reference import Reference
from triptych.services.router.token_texts import TokenTexts

NUM_AT_ONCE = 16


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(timeout=60, trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", http_client=http) as made:
        yield made


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "extra_body": {"top_k": 40, "min_p": 0.01}},
    {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
]


async def test_seeded_output_is_the_same_alone_and_among_others(client: openai.AsyncOpenAI) -> None:
    """Each goes through prefill's batch, the hand-off and decode's batch, with and without a picture."""
    cases = [random_case(7000 + i, i % 2) for i in range(NUM_AT_ONCE)]

    async def ask(i: int) -> str | None:
        fields = {**SAMPLED[i % len(SAMPLED)], "seed": i, "max_tokens": 24}
        return (await client.chat.completions.create(**{**cases[i].body(), **fields})).choices[0].message.content

    alone = [await ask(i) for i in range(NUM_AT_ONCE)]
    assert await asyncio.gather(*map(ask, range(NUM_AT_ONCE))) == alone
    assert len(set(alone)) == NUM_AT_ONCE


async def test_logprobs_are_those_of_transformers(client: openai.AsyncOpenAI, reference: Reference) -> None:
    """Of the first token, which prefill makes, and of those that decode makes; raw, whatever the temperature."""
    case = random_case(7100, 1)
    fields = {"temperature": 0.7, "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 5}
    answer = await client.chat.completions.create(**{**case.body(), **fields, "extra_body": {"ignore_eos": True}})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    texts = TokenTexts(reference.tokenizer.backend_tokenizer)
    ids = {texts.bytes_of(token_id): token_id for token_id in range(len(reference.tokenizer))}
    token_ids = [ids[bytes(token.bytes or [])] for token in logprobs.content]
    assert len(token_ids) == 12
    for token, token_id, row in zip(logprobs.content, token_ids, reference.logprobs(case, token_ids), strict=True):
        assert token.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)


async def test_choices_of_a_greedy_request_are_equal(client: openai.AsyncOpenAI, reference: Reference) -> None:
    case = random_case(7200, 1)
    answer = await client.chat.completions.create(**case.body(n=3))
    assert [choice.message.content for choice in answer.choices] == [reference.answer(case).text] * 3
    sampled = await client.chat.completions.create(**{**case.body(n=3), "temperature": 1.0, "seed": 1, "max_tokens": 16})
    assert len({choice.message.content for choice in sampled.choices}) == 3


async def test_a_stop_string(client: openai.AsyncOpenAI, reference: Reference) -> None:
    case = next(case for case in (random_case(seed, 0) for seed in range(7300, 7400)) if len(reference.answer(case).text) > 12)
    text = reference.answer(case).text
    stop = text[6:9]
    answer = await client.chat.completions.create(**case.body(stop=stop))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text[: text.find(stop)], "stop")


async def test_plain_completions(client: openai.AsyncOpenAI, reference: Reference) -> None:
    """The same prompt by text, by tokens and by chat gives the same answer."""
    case = random_case(7400, 0)
    expected = reference.answer(case)
    token_ids = reference.inputs(case)["input_ids"][0].tolist()
    prompts: list[Any] = [reference.tokenizer.decode(token_ids), token_ids, [token_ids, token_ids]]
    for prompt in prompts:
        answer = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=case.max_tokens,
            temperature=0,
            logprobs=3,
            extra_body={"add_special_tokens": False},
        )
        assert {choice.text for choice in answer.choices} == {expected.text}
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.tokens or []) == len(expected.token_ids)
    stream = await client.completions.create(
        model=MODEL,
        prompt=token_ids,
        max_tokens=case.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)


async def test_stop_tokens_and_a_minimum(client: openai.AsyncOpenAI, reference: Reference) -> None:
    case = next(case for case in (random_case(seed, 0) for seed in range(7500, 7600)) if case.max_tokens > 8)
    third = reference.answer(case).token_ids[2]
    first = reference.answer(case).token_ids.index(third)

    async def num_tokens(**extra: Any) -> tuple[int, str]:
        answer = await client.chat.completions.create(
            **case.body(max_tokens=8, extra_body={"stop_token_ids": [third], **extra})
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    assert await num_tokens() == (first, "stop")
    assert (await num_tokens(min_tokens=6))[0] >= 6
