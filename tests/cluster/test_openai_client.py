"""The OpenAI SDK, as a user has it, against the cluster: models, answers, streams, pictures, usage."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from support.cases import MODEL, random_case
from support.cluster import Cluster
from support.reference import Reference


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(timeout=60, trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", http_client=http) as made:
        yield made


async def test_models(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.object) == (MODEL, "model")
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


@pytest.mark.parametrize("num_pictures", [0, 1, 3])
async def test_an_answer(client: openai.AsyncOpenAI, reference: Reference, num_pictures: int) -> None:
    case = random_case(5000, num_pictures)
    expected = reference.answer(case)
    answer = await client.chat.completions.create(**case.body())
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.message.role == "assistant"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, len(expected.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.model_dump()["image_tokens"] == expected.num_image_tokens


async def test_a_stream_with_usage(client: openai.AsyncOpenAI, reference: Reference) -> None:
    case = random_case(5001, 2)
    expected = reference.answer(case)
    stream = await client.chat.completions.create(**case.body(stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in deltas if chunk.choices[0].finish_reason] == [expected.finish_reason]
    assert all(chunk.usage is None for chunk in deltas)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(expected.token_ids)


async def test_a_stream_without_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**random_case(5002, 0).body(stream=True))
    chunks = [chunk async for chunk in stream]
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)


async def test_leaving_a_stream_early(client: openai.AsyncOpenAI) -> None:
    """The cluster fixture then checks that nothing is held."""
    case = random_case(5003, 1)
    stream = await client.chat.completions.create(**case.body(stream=True, max_tokens=1000))
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
