"""What comes out of the router: choices, stop strings, probabilities, usage, completions, tokens, pings (robustness B-D)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from support.fake_stages import ANSWER, MODEL, FakeStage, World, events, text_of, until
from support.raw_client import RawClient
from triptych.services.router.responses import ChatBodies
from triptych.shared.errors import InstanceLost, InternalError
from triptych.shared.messages import Accepted, DecodeRequest, Message, PrefillReply, PrefillRequest


@pytest.fixture
async def world(toy_checkpoint: Path) -> AsyncIterator[World]:
    """With all stages. Every test must leave nothing behind."""
    async with World(toy_checkpoint, stage_wait_s=1.0) as made:
        made.add_all()
        yield made
        await made.settled()


@pytest.fixture
async def pinging(toy_checkpoint: Path) -> AsyncIterator[World]:
    """As `world`; says something in every short silence."""
    async with World(toy_checkpoint, stage_wait_s=1.0, ping_interval_s=0.05) as made:
        made.add_all()
        yield made
        await made.settled()


def stage(world: World, name: str) -> FakeStage:
    return next(one for one in world.all_stages if one.name == f"{name}-0")


async def complete(world: World, prompt: Any, **fields: Any) -> httpx.Response:
    return await world.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 100, **fields})


def endless(world: World, text: str) -> FakeStage:
    """A decode instance that says `text` after the prompt's first token and then waits to be told to stop."""
    ids = world.tokenizer.encode(text, add_special_tokens=False).ids
    decode = stage(world, "decode")

    async def say(request: DecodeRequest) -> Message:
        decode.spawn(decode.stream(request, ids, end=False))
        return Accepted()

    decode.hooks[DecodeRequest] = say
    return decode


# --- choices and their sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_choices(world: World, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await world.ask("hello", n=3, seed=10, temperature=1, stream=stream, **options)
    seeds = [request.sampling.seed for request in stage(world, "prefill").seen]
    assert sorted(seeds) == [10, 11, 12]
    if stream:
        found = events(response.text)
        texts = [text_of([e for e in found[:-2] if e["choices"][0]["index"] == i]) for i in range(3)]
        ends = [e["choices"][0]["index"] for e in found[:-2] if e["choices"][0]["finish_reason"] == "stop"]
        assert [e["choices"][0]["delta"] for e in found[:3]] == [{"role": "assistant", "content": ""}] * 3
        usage = found[-2]["usage"]
        assert sorted(ends) == [0, 1, 2]
    else:
        body = response.json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in body["choices"]]
        usage = body["usage"]
    assert texts == [ANSWER] * 3
    assert usage["completion_tokens"] == 3 * len(world.answer_ids)
    alone = (await world.ask("hello")).json()["usage"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_fails_the_request(world: World, stream: bool) -> None:
    prefill = stage(world, "prefill")

    async def refuse_one(request: PrefillRequest) -> Message:
        if request.sampling.seed == 11:
            raise InternalError("broken")
        return await prefill.default(request)

    prefill.hooks[PrefillRequest] = refuse_one
    response = await world.ask("hello", n=2, seed=10, stream=stream)
    error = (events(response.text)[-1] if response.status_code == 200 else response.json())["error"]
    assert error["code"] == "internal"


async def test_all_fields_reach_prefill_and_decode(world: World) -> None:
    fields = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}
    await world.ask(
        "hello", **fields, temperature=0.5, seed=3, min_tokens=2, max_tokens=40, stop_token_ids=[7], ignore_eos=True
    )
    [prefill], [decode] = stage(world, "prefill").seen, stage(world, "decode").seen
    assert prefill.sampling == decode.sampling
    sampling = msgspec.to_builtins(prefill.sampling)
    assert {name: sampling[name] for name in fields} == fields
    assert (sampling["temperature"], sampling["seed"], sampling["min_tokens"], sampling["max_tokens"]) == (0.5, 3, 2, 40)
    assert prefill.sampling.stop_token_ids == (7,)
    assert len(decode.prompt_token_set) > 0
    await world.ask("hello")
    assert stage(world, "decode").seen[-1].prompt_token_set == b""
    assert stage(world, "decode").seen[-1].sampling.stop_token_ids == (world.tokenizer.token_to_id("<|im_end|>"),)


# --- stop strings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_output_at_once(world: World, stream: bool) -> None:
    """The decode instance would go on for ever: the answer comes because the router stops it."""
    decode = endless(world, " one two END and more")
    response = await world.ask("hello", stop=["nothing", "END"], stream=stream, stream_options={"include_usage": True})
    said = world.tokenizer.decode([world.answer_ids[0]]) + " one two "
    if stream:
        found = events(response.text)
        assert text_of(found) == said
        assert all("E" not in event["choices"][0]["delta"].get("content", "") for event in found[:-2])
        assert found[-3]["choices"][0]["finish_reason"] == "stop"
        usage = found[-2]["usage"]
    else:
        [choice] = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
        usage = response.json()["usage"]
    upto = [world.answer_ids[0], *world.tokenizer.encode(" one two END", add_special_tokens=False).ids]
    assert usage["completion_tokens"] == len(upto)
    await until(lambda: len(decode.released) == 1, "released")


async def test_a_beginning_of_a_stop_string_is_not_lost(world: World) -> None:
    response = await world.ask("hello", stop=[ANSWER[-3:] + "!"], stream=True)
    assert text_of(events(response.text)) == ANSWER


async def test_an_output_that_is_attempted_again_goes_on(world: World) -> None:
    """What the first decode instance said is not said again, nor searched for stop strings, nor are its probabilities lost."""
    decode = stage(world, "decode")
    attempts = 0

    async def lose_once(request: DecodeRequest) -> Message:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await decode.stream(request, world.answer_ids[1:6], end=False)
            await decode.send(request, 6, error=InstanceLost("gone").to_wire())
            return Accepted()
        return await decode.default(request)

    decode.hooks[DecodeRequest] = lose_once
    body = (await world.ask("hello", stop=["x"], logprobs=True)).json()
    assert attempts == 2
    assert body["choices"][0]["message"]["content"] == ANSWER
    told(body["choices"][0]["logprobs"]["content"], world, num_top=0)
    assert body["usage"]["completion_tokens"] == len(world.answer_ids)


# --- probabilities -----------------------------------------------------------------------------------------------------------


def told(entries: list[dict[str, Any]], world: World, num_top: int = 2) -> None:
    """Every token of the answer, the first included, with its bytes and what the stages said of it."""
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == ANSWER
    assert [entry["logprob"] for entry in entries] == [-float(id_) for id_ in world.answer_ids]
    for entry in entries:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, -0.5][:num_top]
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])


async def test_logprobs_in_chat(world: World) -> None:
    response = await world.ask("hello", logprobs=True, top_logprobs=2)
    told(response.json()["choices"][0]["logprobs"]["content"], world)
    found = events((await world.ask("hello", logprobs=True, top_logprobs=2, stream=True)).text)
    chunks = [event["choices"][0] for event in found[:-1]]
    told([entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]], world)
    assert all(bool(chunk["logprobs"]) == bool(chunk["delta"].get("content")) for chunk in chunks)
    plain = (await world.ask("hello", logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)
    assert (await world.ask("hello")).json()["choices"][0]["logprobs"] is None


async def test_an_answer_with_logprobs_is_written_off_the_event_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def whole(bodies: ChatBodies, *args: Any) -> bytes:
        threads.append(threading.current_thread())
        return b"{}"

    monkeypatch.setattr(ChatBodies, "whole", whole)
    await world.ask("hello", logprobs=True)
    await world.ask("hello")  # of an answer without them that would only cost time
    assert [thread is threading.current_thread() for thread in threads] == [False, True]


async def test_logprobs_in_plain_completions(world: World) -> None:
    logprobs = (await complete(world, "hello", logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-float(id_) for id_ in world.answer_ids]
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, top, id_ in zip(logprobs["tokens"], logprobs["top_logprobs"], world.answer_ids, strict=True):
        assert top[token] == -float(id_)
        assert 2 <= len(top) <= 3


# --- usage ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("options", "with_usage"),
    [({"stream_options": {"include_usage": True}}, True), ({"stream_options": {"include_usage": False}}, False), ({}, False)],
)
async def test_usage_of_a_stream(world: World, api: str, options: dict[str, Any], with_usage: bool) -> None:
    """Asked for: one last event with choices [], all others say null. Else no event has the key."""
    ask = world.ask if api == "chat" else lambda prompt, **fields: complete(world, prompt, **fields)
    found = events((await ask("hello", stream=True, **options)).text)
    *pieces, done = found
    assert done == "[DONE]"
    assert all("choices" in event for event in pieces)
    if with_usage:
        last = pieces.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(world.answer_ids)
        assert all(event["usage"] is None for event in pieces)
    assert all(("usage" in event) == with_usage for event in pieces)
    assert all(len(event["choices"]) == 1 for event in pieces)
    assert len({(event["id"], event["object"], event["model"], event["created"]) for event in pieces}) == 1


async def test_cached_tokens_are_what_prefill_says(world: World) -> None:
    prefill = stage(world, "prefill")

    async def cached(request: PrefillRequest) -> Message:
        reply = await prefill.default(request)
        assert isinstance(reply, PrefillReply)
        return msgspec.structs.replace(reply, num_cached_tokens=7)

    assert (await world.ask("hello")).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prefill.hooks[PrefillRequest] = cached
    assert (await world.ask("hello")).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


# --- plain completions and tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_completions(world: World, stream: bool) -> None:
    response = await complete(world, "<|im_start|>user\nhi", stream=stream)
    if stream:
        found = events(response.text)
        assert "".join(event["choices"][0]["text"] for event in found[:-1]) == ANSWER
        assert found[-2]["choices"][0]["finish_reason"] == "stop"
        assert {event["object"] for event in found[:-1]} == {"text_completion"}
    else:
        body = response.json()
        assert body["id"].startswith("cmpl-")
        [choice] = body["choices"]
        assert choice == {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}
    [request] = stage(world, "prefill").seen
    assert request.prompt.num_tokens == len(world.tokenizer.encode("<|im_start|>user\nhi", add_special_tokens=False).ids)


async def test_several_plain_prompts(world: World) -> None:
    ids = [world.tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "two words")]
    by_text = (await complete(world, ["a", "two words"], n=2)).json()
    by_ids = (await complete(world, ids, n=2)).json()
    for body in (by_text, by_ids):
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert body["usage"]["completion_tokens"] == 4 * len(world.answer_ids)
    assert (await complete(world, ids[0])).json()["usage"]["prompt_tokens"] == len(ids[0])


@pytest.mark.parametrize("prompt", ["", [], [10_000_000], "x <|image_pad|>", ["ok", ""]])
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_plain_prompts(world: World, prompt: Any, stream: bool) -> None:
    response = await complete(world, prompt, stream=stream)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_a_plain_prompt_that_is_too_long(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, max_model_len=50) as world:
        world.add_all()
        response = await complete(world, "word " * 100)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_tokenize_and_back(world: World) -> None:
    text = "grün <|im_end|> 🎉"
    made = (await world.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert (made["max_model_len"], made["token_strs"].count("<|im_end|>")) == (20_000, 1)
    back = await world.http.post("/detokenize", json={"model": MODEL, "tokens": made["tokens"]})
    assert back.json() == {"prompt": text}
    messages = [{"role": "user", "content": "hello"}]
    chat = (await world.http.post("/tokenize", json={"model": MODEL, "messages": messages})).json()
    assert chat["count"] == (await world.ask("hello")).json()["usage"]["prompt_tokens"]
    assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,x"}]}]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404),
        ("/detokenize", [], 400),
    ],
)
async def test_bad_tokenizing(world: World, path: str, body: Any, status: int) -> None:
    response = await world.http.post(path, json=body)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    running = world.router._running
    assert running is not None
    assert running.edge.bodies.num_bytes == 0


async def test_version(world: World) -> None:
    assert (await world.http.get("/version")).json() == {"version": metadata.version("triptych")}


# --- streams -----------------------------------------------------------------------------------------------------------------


async def test_no_piece_of_a_stream_cuts_a_character(world: World) -> None:
    endless_text = "🎉🎉 ü 你好 🧑‍🚀 ok"
    decode = endless(world, endless_text + "STOP")
    found = events((await world.ask("hello", stream=True, stop="STOP")).text)
    assert all("\ufffd" not in event["choices"][0]["delta"].get("content", "") for event in found[:-1])
    assert text_of(found).endswith(endless_text)
    await until(lambda: len(decode.released) == 1, "released")


async def test_pings_while_the_first_token_takes_its_time(pinging: World) -> None:
    """The role comes at once, comments keep the connection alive, then all goes on as ever."""
    prefill, is_open = stage(pinging, "prefill"), asyncio.Event()

    async def slow(request: PrefillRequest) -> Message:
        await is_open.wait()
        return await prefill.default(request)

    prefill.hooks[PrefillRequest] = slow
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    async with pinging.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        received = ""
        async for piece in response.aiter_text():
            received += piece
            if received.count(": ping\n\n") == 2:
                is_open.set()
    assert received.startswith("data: ")
    assert '"role":"assistant"' in received.split("\n\n")[0]
    assert text_of(events(received.replace(": ping\n\n", ""))) == ANSWER


async def test_an_error_after_pings_is_an_event(pinging: World) -> None:
    prefill, is_open = stage(pinging, "prefill"), asyncio.Event()

    async def slow(request: PrefillRequest) -> Message:
        await is_open.wait()
        raise InternalError("broken")

    prefill.hooks[PrefillRequest] = slow
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    async with pinging.http.stream("POST", "/v1/chat/completions", json=body) as response:
        received = ""
        async for piece in response.aiter_text():
            received += piece
            if ": ping" in received:
                is_open.set()
    [opening, last] = events(received.replace(": ping\n\n", ""))
    assert opening["choices"][0]["finish_reason"] is None
    assert last["error"]["code"] == "internal"


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stage_name", ["prefill", "decode"])
async def test_a_client_that_leaves_a_stream_ends_all_of_it(pinging: World, num_choices: int, stage_name: str) -> None:
    """Before the first token (with pings already out) and in the middle; the fixture checks that nothing is left."""
    prefill = stage(pinging, "prefill")
    if stage_name == "prefill":

        async def never(request: PrefillRequest) -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        prefill.hooks[PrefillRequest] = never
    decode = endless(pinging, " on and on")
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": num_choices}
    client = await RawClient.post(pinging.url, body)
    busy = prefill if stage_name == "prefill" else decode
    await until(lambda: len(busy.seen) == num_choices, "all choices are there")
    if stage_name == "decode":
        await client.read_chunks(2)
    else:
        await client.read_line(": ping")
    client.cut()
    await until(lambda: len(busy.released) == num_choices, "all choices released")


# --- conversations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
        [{"role": "assistant", "content": "only me"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": None}],
        [{"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "turn"}] * 100,
    ],
    ids=["empty assistant", "tool calls", "assistant alone", "no parts", "null", "system parts", "many turns"],
)
async def test_odd_conversations(world: World, messages: list[dict[str, Any]]) -> None:
    """No turn is dropped, whatever it holds."""
    response = await world.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    [request] = stage(world, "prefill").seen
    token_ids = memoryview(request.prompt.inline).cast("I").tolist()
    text = world.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text.count("<|im_start|>") == len(messages) + 1
    for message in messages:
        said = message["content"]
        assert f"<|im_start|>{message['role']}\n{said if isinstance(said, str) else ''}" in text


async def test_no_messages(world: World) -> None:
    assert (await world.http.post("/v1/chat/completions", json={"messages": []})).status_code == 400


@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
async def test_pictures_in_any_message_stay_where_they_are(world: World, role: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b <|image_pad|>"}, picture]
    messages = [{"role": role, "content": parts}, {"role": "user", "content": "c"}]
    response = await world.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    [request] = stage(world, "prefill").seen
    text = world.tokenizer.decode(memoryview(request.prompt.inline).cast("I").tolist(), skip_special_tokens=False)
    slot = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert f"<|im_start|>{role}\na{slot}b <|image_pad|>{slot}<|im_end|>" in text
    assert len(request.images) == 2
