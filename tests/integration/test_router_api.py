"""The router's HTTP API in front of stages without a model: answers, streams, errors, faults, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from support.fake_stages import ANSWER, IMAGE_TOKENS, MODEL, World, events, text_of, until
from triptych.services.router.api_types import ImageInput
from triptych.services.router.app import NUM_WORKER_THREADS
from triptych.services.router.data_url import ImageSource
from triptych.services.router.prompt import PromptBuilder
from triptych.shared.errors import BadRequest, InstanceLost, InternalError, Overloaded
from triptych.shared.messages import (
    Accepted,
    DecodeRequest,
    EncodeRequest,
    PrefillReply,
    PrefillRequest,
    PreprocessRequest,
    RequestId,
    StageTime,
)
from triptych.shared.token_bytes import unpack_tokens

PNG = b"\x89PNG-not-really"
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def picture(url: str = DATA_URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- answers ----------------------------------------------------------------------------------------------------------------


async def test_text(world: World) -> None:
    stages = world.add_all()
    response = await world.ask("hello")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(world.answer_ids)
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] == 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert not stages["preprocess"].seen
    assert not stages["encoder"].seen
    [prefill] = stages["prefill"].seen
    ids = memoryview(prefill.prompt.inline).cast("I").tolist()
    assert world.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prefill.sampling.stop_token_ids == (world.tokenizer.token_to_id("<|im_end|>"),)
    assert "triptych" not in body


async def test_two_pictures_go_where_the_text_has_them(world: World) -> None:
    stages = world.add_all()
    other = world.add("encoder-1", "encoder")

    async def wait_for_both(request: EncodeRequest) -> Any:
        await until(lambda: bool(stages["encoder"].seen and other.seen), "each encoder has a picture")
        return await other.default(request)

    stages["encoder"].hooks[EncodeRequest] = other.hooks[EncodeRequest] = wait_for_both
    response = await world.ask(
        [words("one"), picture(), words("two"), picture("http://pictures.test/a.png")], headers={"X-Triptych-Trace": "1"}
    )
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == 2 * IMAGE_TOKENS
    [prefill] = stages["prefill"].seen
    ids = memoryview(prefill.prompt.inline).cast("I").tolist()
    pad = world.tokenizer.token_to_id("<|image_pad|>")
    offsets = [placed.offset for placed in prefill.images]
    for offset in offsets:
        assert ids[offset : offset + IMAGE_TOKENS] == [pad] * IMAGE_TOKENS
    assert ids.count(pad) == 2 * IMAGE_TOKENS
    assert prefill.prompt.num_tokens == len(ids) == response.json()["usage"]["prompt_tokens"]
    assert world.tokenizer.decode(ids[: offsets[0]]).endswith("one")
    assert world.tokenizer.decode(ids[offsets[0] : offsets[1]]) == "two"
    assert {request.url or "uploaded" for request in stages["preprocess"].seen} == {"uploaded", "http://pictures.test/a.png"}
    assert [request.content for request in stages["preprocess"].seen if not request.url] == [PNG]
    assert len(stages["encoder"].seen) == len(other.seen) == 1, "each picture goes to the encoder with least to do"
    trace = response.json()["triptych"]
    assert trace["attempts"] == 1
    assert (
        sorted(stage["stage"] for stage in trace["stages"])
        == ["decode", "encoder", "encoder"] + ["prefill"] + ["preprocess"] * 2
    )
    assert {stage["compute_ms"] for stage in trace["stages"]} == {3.0}


async def test_a_picture_is_encoded_while_another_is_still_fetched(world: World) -> None:
    stages = world.add_all()
    go = asyncio.Event()

    async def slow(request: PreprocessRequest) -> Any:
        if request.url is not None:
            await go.wait()
        return await stages["preprocess"].default(request)

    stages["preprocess"].hooks[PreprocessRequest] = slow
    asking = asyncio.create_task(world.ask([picture("http://slow.test/a.png"), picture()]))
    await until(lambda: len(stages["encoder"].seen) == 1, "the other picture is encoded")
    go.set()
    assert (await asking).status_code == 200


async def test_stream(world: World) -> None:
    world.add_all()
    response = await world.ask("hello", stream=True, headers={"X-Triptych-Trace": "1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(found) == ANSWER
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert found[-2]["choices"][0]["delta"] == {}
    assert [stage["stage"] for stage in found[-2]["triptych"]["stages"]] == ["prefill", "decode"]
    assert all("usage" not in chunk for chunk in found[:-1])
    assert len({chunk["id"] for chunk in found[:-1]}) == 1


async def test_stream_with_usage(world: World) -> None:
    world.add_all()
    found = events((await world.ask("hello", stream=True, stream_options={"include_usage": True})).text)
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == len(world.answer_ids)
    assert all(chunk["usage"] is None for chunk in found[:-2])


@pytest.mark.parametrize("stream", [False, True])
async def test_output_that_ends_in_prefill(world: World, stream: bool) -> None:
    stages = world.add_all()

    async def stop(request: PrefillRequest) -> PrefillReply:
        time = StageTime("prefill", stages["prefill"].instance_id)
        reason: Any = "length" if request.sampling.max_tokens == 1 else "stop"
        return PrefillReply(world.answer_ids[0], time, finish_reason=reason)

    stages["prefill"].hooks[PrefillRequest] = stop
    for max_tokens, text, count in ((1, "A", 1), (5, "", 0)):
        response = await world.ask(max_tokens=max_tokens, stream=stream, stream_options={"include_usage": True})
        if stream:
            found = events(response.text)
            assert text_of(found) == text
            assert found[-2]["usage"]["completion_tokens"] == count
        else:
            assert response.json()["choices"][0]["message"]["content"] == text
            assert response.json()["usage"]["completion_tokens"] == count
    assert not stages["decode"].seen


async def test_max_tokens_and_the_finish_reason_length(world: World) -> None:
    stages = world.add_all()
    response = await world.ask(max_tokens=50, max_completion_tokens=3)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 3
    await world.ask("hi")
    await world.ask([words("hi"), picture()])
    _, text, pictured = stages["prefill"].seen
    assert pictured.prompt.num_tokens == text.prompt.num_tokens + IMAGE_TOKENS + 2, "expanded, between two marks"
    for unbounded in (text, pictured):
        assert unbounded.sampling.max_tokens == world.max_model_len - unbounded.prompt.num_tokens


async def test_a_long_prompt_does_not_ride_on_the_bus(world: World) -> None:
    stages = world.add_all()
    response = await world.ask("x" * 15_000)
    assert response.status_code == 200, response.text
    [prefill] = stages["prefill"].seen
    assert prefill.prompt.inline == b""
    [blob] = world.blobs
    assert prefill.prompt.leased.num_bytes == len(blob) == 4 * prefill.prompt.num_tokens
    assert prefill.prompt.leased.owner == stages["preprocess"].instance_id


async def test_many_at_once(world: World) -> None:
    world.add_all()
    world.add("decode-1", "decode")
    answers = await asyncio.gather(*(world.ask([words("q"), picture()], stream=i % 2 == 0) for i in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    for i, answer in enumerate(answers):
        text = text_of(events(answer.text)) if i % 2 == 0 else answer.json()["choices"][0]["message"]["content"]
        assert text == ANSWER


async def test_request_ids(world: World) -> None:
    stages = world.add_all()
    given = await world.ask(headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert "mine" not in stages["prefill"].seen[0].request_id, "what stages see is our own, unique id"
    odd = await world.ask(headers={"X-Request-Id": "no spaces allowed"})
    assert odd.headers["x-request-id"] != "no spaces allowed"
    assert len(odd.headers["x-request-id"]) > 10
    assert (await world.http.get("/v1/nothing")).headers["x-request-id"]


# --- readiness --------------------------------------------------------------------------------------------------------------


async def test_readiness_and_models(world: World) -> None:
    assert (await world.http.get("/live")).status_code == 200
    assert (await world.http.get("/ready")).status_code == 503
    assert (await world.http.get("/v1/models")).json()["data"] == []
    stages = world.add_all()
    ready = await world.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["instances"]["encoder"] == [stages["encoder"].instance_id]
    assert (await world.http.get("/health")).status_code == 200
    [model] = (await world.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["owned_by"]) == (MODEL, "triptych")
    assert (await world.http.get(f"/v1/models/{MODEL}")).json() == model
    assert (await world.http.get("/v1/models/other")).status_code == 404
    stages["encoder"].die()
    waiting = await world.http.get("/health")
    assert waiting.status_code == 503
    assert waiting.json()["missing"] == ["encoder"]


async def test_an_instance_of_another_model_is_not_used(world: World) -> None:
    world.revision = "other"
    world.add_all()
    assert (await world.http.get("/ready")).status_code == 503


async def test_draining(world: World) -> None:
    world.add_all()
    world.context.lifecycle.begin_drain(exit=False)
    assert (await world.http.get("/ready")).status_code == 503
    assert (await world.http.get("/live")).status_code == 200
    response = await world.ask()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert error_of(response)["code"] == "overloaded"


async def test_metrics(world: World) -> None:
    world.add_all()
    await world.ask()
    await world.ask(temperature=9)
    await world.settled()
    text = (await world.http.get("/metrics")).text
    assert 'triptych_requests_total{code="200",finish_reason="stop"} 1.0' in text
    assert 'triptych_requests_total{code="400",finish_reason=""} 1.0' in text
    assert 'triptych_requests_total{code="503",finish_reason=""} 0.0' in text
    assert 'triptych_time_to_first_token_seconds_count{modality="text"} 1.0' in text
    assert 'triptych_e2e_request_latency_seconds_count{modality="text"} 1.0' in text
    assert 'triptych_stage_seconds_count{stage="decode"} 1.0' in text
    assert 'triptych_requests_inflight{stage="router"} 0.0' in text


# --- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"temperature": 3}, 400, None, "temperature"),
        ({"max_tokens": 0}, 400, None, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "context_length_exceeded", "max_tokens"),
        ({"tools": [{}], "stream": True}, 400, "unsupported_parameter", "tools"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 400, "context_length_exceeded", "messages"),
    ],
)
async def test_bad_requests(world: World, fields: dict[str, Any], status: int, code: str | None, param: str) -> None:
    world.add_all()
    response = await world.ask(**fields)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)


async def test_routes_and_methods(world: World) -> None:
    for response, status in (
        (await world.http.get("/v1/nothing"), 404),
        (await world.http.get("/v1/chat/completions"), 405),
        (await world.http.post("/v1/chat/completions", content=b"{"), 400),
    ):
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"


async def test_context_length_counts_text_and_images(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, max_model_len=40, stage_wait_s=1.0) as world:
        stages = world.add_all()
        response = await world.ask([words("hi"), *[picture()] * 8])
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert f"{8 * IMAGE_TOKENS} image tokens" in error["message"]
        assert not stages["prefill"].seen
        await world.settled()


async def test_a_body_over_the_bound_is_answered_before_it_is_read(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, max_body_bytes=2000, stage_wait_s=1.0) as world:
        reader, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500000000\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 413")
        writer.close()

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 1000

        response = await world.http.post("/v1/chat/completions", content=chunks())
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        await world.settled()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_body_that_does_not_arrive(toy_checkpoint: Path, path: str) -> None:
    """A slow client does not keep a place inside for ever."""
    async with World(toy_checkpoint, body_timeout_s=0.2) as world:
        reader, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()
        await world.settled()


async def test_tokenizing_is_bounded(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, max_inflight=1) as world:
        _, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await until(lambda: world.router._num_tokenizing == 1, "the first arrives")
        response = await world.http.post("/detokenize", json={"tokens": [1]})
        assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        writer.close()
        await until(lambda: world.router._num_tokenizing == 0, "the first is gone")
        assert (await world.http.post("/detokenize", json={"tokens": [1]})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_bodies_are_bounded_in_sum_until_the_first_token(toy_checkpoint: Path, stream: bool) -> None:
    async with World(toy_checkpoint, max_body_bytes=1500, body_store_bytes=1500, stage_wait_s=5) as world:
        stages = world.add_all()
        go = asyncio.Event()

        async def wait(request: DecodeRequest) -> Accepted:
            async def work() -> None:
                await go.wait()
                await stages["decode"].stream(request, world.answer_ids[1:])

            stages["decode"].spawn(work())
            return Accepted()

        stages["decode"].hooks[DecodeRequest] = wait
        first = asyncio.create_task(world.ask("x" * 1000, stream=stream))
        await until(lambda: bool(stages["decode"].seen), "the first has its first token")
        if stream:
            await until(lambda: world.router._running.edge.bodies.num_bytes == 0, "its body is gone")  # type: ignore[union-attr]
        second = asyncio.create_task(world.ask("y" * 1000, stream=stream))
        if not stream:
            assert (await second).status_code == 503
        go.set()
        assert (await first).status_code == 200
        assert (await second).status_code == (200 if stream else 503)
        await world.settled()


async def test_pictures_are_let_go_of_with_the_first_token(world: World) -> None:
    stages = world.add_all()
    go = asyncio.Event()

    async def wait(request: DecodeRequest) -> Accepted:
        async def work() -> None:
            await stages["decode"].send(request, 1, world.answer_ids[1:2])
            await go.wait()
            await stages["decode"].send(request, 2, finish_reason="stop", time=stages["decode"].time("decode"))

        stages["decode"].spawn(work())
        return Accepted()

    stages["decode"].hooks[DecodeRequest] = wait
    body = {"model": MODEL, "messages": [{"role": "user", "content": [picture()]}], "stream": True}
    async with world.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        gc.collect()
        assert not [kept for kept in gc.get_objects() if type(kept) is ImageInput]
        assert not [kept for kept in gc.get_objects() if type(kept) is ImageSource and kept.content]
        go.set()
        assert [line async for line in lines][-2] == "data: [DONE]"


async def test_a_prompt_that_waits_too_long_for_a_thread_is_no_fault_of_its_client(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.services.router.edge.SHORT_BYTES", 0)
    monkeypatch.setattr("triptych.services.router.edge.PREPARE_TIMEOUT_S", 0.05)
    world.add_all()
    go = threading.Event()
    for _ in range(NUM_WORKER_THREADS):
        world.router._workers.submit(go.wait, 10)
    response = await world.ask()
    go.set()
    assert response.status_code == 503
    assert error_of(response)["code"] == "overloaded"


async def test_a_short_prompt_waits_for_no_thread(world: World) -> None:
    world.add_all()
    go = threading.Event()
    for _ in range(NUM_WORKER_THREADS):
        world.router._workers.submit(go.wait, 10)
    assert (await world.ask()).status_code == 200
    go.set()


async def test_nor_is_one_whose_thread_came_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.services.router.edge.SHORT_BYTES", 0)
    monkeypatch.setattr("triptych.services.router.edge.PREPARE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("triptych.services.router.edge.time", SimpleNamespace(monotonic=lambda: 0.0))  # it has just begun
    world.add_all()
    go = threading.Event()
    monkeypatch.setattr(PromptBuilder, "build", lambda *_: go.wait(10))
    response = await world.ask()
    go.set()
    assert response.status_code == 503


async def test_tokenizing_for_its_own_sake_keeps_no_chat_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add_all()
    go = threading.Event()
    monkeypatch.setattr("triptych.services.router.app.tokenize", lambda *_: {"went": go.wait(10)})
    asked = [asyncio.create_task(world.http.post("/tokenize", json={})) for _ in range(NUM_WORKER_THREADS + 1)]
    assert (await world.ask()).status_code == 200
    assert not any(task.done() for task in asked)
    go.set()
    assert [(await task).json() for task in asked] == [{"went": True}] * len(asked)


@pytest.mark.parametrize("code", ["tensor_gone", "instance_lost"])
async def test_what_got_lost_on_every_attempt_may_be_asked_for_again(world: World, code: str) -> None:
    """No instance ended: the request is not what kills them. One that was silent for a while is told of as lost, by the
    stages too, each when it has missed enough heartbeats."""
    stages = world.add_all()

    async def miss(_request: Any) -> Any:
        raise InstanceLost("a tensor is no longer held", code=code)

    stages["prefill"].hooks[PrefillRequest] = miss
    response = await world.ask()
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert len(stages["prefill"].seen) == world.settings.max_attempts


async def test_a_broken_picture_names_itself(world: World) -> None:
    stages = world.add_all()

    async def refuse(request: PreprocessRequest) -> Any:
        raise BadRequest("the image cannot be decoded", code="invalid_image", param=request.param)

    stages["preprocess"].hooks[PreprocessRequest] = refuse
    response = await world.ask([words("x"), picture()], stream=True)
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages.[0].content.[1].image_url"
    assert len(stages["preprocess"].seen) == 1, "a bad request is not tried again"


async def test_a_bug_in_a_stage_is_a_500_that_clients_do_not_retry(world: World) -> None:
    stages = world.add_all()

    async def fail(_request: Any) -> Any:
        raise InternalError

    stages["prefill"].hooks[PrefillRequest] = fail
    response = await world.ask()
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert error_of(response)["type"] == "server_error"
    assert len(stages["prefill"].seen) == 1


async def test_too_many_inside(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, max_inflight=1, stage_wait_s=5) as world:
        stages = world.add_all()
        go = asyncio.Event()

        async def wait(request: PrefillRequest) -> Any:
            await go.wait()
            return await stages["prefill"].default(request)

        stages["prefill"].hooks[PrefillRequest] = wait
        first = asyncio.create_task(world.ask())
        await until(lambda: bool(stages["prefill"].seen), "the first is inside")
        refused = await world.ask()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        go.set()
        assert (await first).status_code == 200
        await world.settled()


async def test_slow_senders_do_not_keep_others_out(toy_checkpoint: Path) -> None:
    """A place inside is taken when the body is there; those that are still arriving have a bound of their own."""
    async with World(toy_checkpoint, max_inflight=2) as world:
        world.add_all()
        writers = []
        for _ in range(7):
            _, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            writers.append(writer)
        await until(lambda: world.router.report().loads[0].num_running == 7, "seven bodies are arriving")
        assert (await world.ask()).status_code == 200
        _, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
        writers.append(writer)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await until(lambda: world.router.report().loads[0].num_running == 8, "eight bodies are arriving")
        refused = await world.ask()
        assert refused.status_code == 503
        assert "arriving" in error_of(refused)["message"]
        for writer in writers:
            writer.close()
        await world.settled()


# --- faults -----------------------------------------------------------------------------------------------------------------


async def test_no_encoder_refuses_pictures_but_not_text(world: World) -> None:
    stages = world.add_all()
    stages["encoder"].die()
    picture_answer, text_answer = await asyncio.gather(world.ask([picture()]), world.ask("text"))
    assert text_answer.status_code == 200
    assert picture_answer.status_code == 503
    assert error_of(picture_answer)["code"] == "stage_unavailable"
    assert picture_answer.headers["retry-after"]


async def test_a_stage_that_comes_back_in_time(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, stage_wait_s=10.0) as world:
        stages = world.add_all()
        stages["encoder"].die()
        asking = asyncio.create_task(world.ask([picture()]))
        await until(lambda: bool(stages["preprocess"].seen), "preprocessed")
        world.add("encoder-1", "encoder")
        assert (await asking).status_code == 200
        await world.settled()


async def test_a_full_instance_means_another_one(world: World) -> None:
    stages = world.add_all()
    other = world.add("prefill-1", "prefill")

    async def refuse(_request: Any) -> Any:
        raise Overloaded("full")

    stages["prefill"].hooks[PrefillRequest] = refuse
    response = await world.ask(headers={"X-Triptych-Trace": "1"})
    assert response.status_code == 200
    assert response.json()["triptych"]["attempts"] == 1
    assert len(other.seen) == 1
    other.hooks[PrefillRequest] = refuse
    response = await world.ask()
    assert response.status_code == 503
    assert len(stages["prefill"].seen) > 2, "it is asked again until stage_wait_s is over"


async def test_a_store_too_small_for_all_at_once(toy_checkpoint: Path) -> None:
    """Eight requests of three pictures need 24 places, of which there are four. Whoever holds one or two and waits for the
    rest must let go some time, and all are answered in the end, each on an attempt that was not refused."""
    async with World(toy_checkpoint, stage_wait_s=1.0, policy="static") as world:
        stages = world.add_all()
        encoder, held = stages["encoder"], Counter[RequestId]()

        async def encode(request: EncodeRequest) -> Any:
            give_up_at_s = time.monotonic() + 0.05
            while held.total() >= 4:
                if time.monotonic() > give_up_at_s:
                    raise Overloaded("full", code="tensor_store_full")
                await asyncio.sleep(0.001)
                for request_id in encoder.released:
                    held.pop(request_id, None)
            held[request.request_id] += 1
            return await encoder.default(request)

        async def prefill(request: PrefillRequest) -> Any:
            assert held.pop(request.request_id) == 3
            return await stages["prefill"].default(request)

        encoder.hooks[EncodeRequest], stages["prefill"].hooks[PrefillRequest] = encode, prefill
        answers = await asyncio.gather(*(world.ask([picture()] * 3, stream=i % 2 == 0) for i in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert encoder.released, "some gave up what they held"
        await world.settled()


@pytest.mark.parametrize("stage", ["preprocess", "encoder", "prefill", "decode"])
@pytest.mark.parametrize("tell", [True, False])
async def test_an_instance_lost_while_it_works(world: World, stage: str, tell: bool) -> None:
    """Told by the registry (the request hangs), or seen by the next request that nobody answers."""
    stages = world.add_all()
    kind = {"preprocess": PreprocessRequest, "encoder": EncodeRequest, "prefill": PrefillRequest, "decode": DecodeRequest}[
        stage
    ]

    async def die(_request: Any) -> Any:
        stages[stage].die(tell=tell)
        world.add(f"{stage}-1", stage)
        if not tell:
            raise InstanceLost("gone", instance_id=stages[stage].instance_id)
        await asyncio.Event().wait()

    stages[stage].hooks[kind] = die
    response = await world.ask([words("x"), picture()], stream=True, headers={"X-Triptych-Trace": "1"})
    assert response.status_code == 200, response.text
    found = events(response.text)
    assert text_of(found) == ANSWER
    is_picture = stage in ("preprocess", "encoder")  # it alone goes again
    assert found[-2]["triptych"]["attempts"] == (1 if is_picture else 2)
    if stage == "decode":
        first, second = (request.request_id for request in stages["prefill"].seen[-2:])
        assert first != second, "an attempt has an id of its own"


@pytest.mark.parametrize("stage", ["preprocess", "encoder", "prefill", "decode"])
async def test_an_instance_that_is_gone_before_anything_reached_it(world: World, stage: str) -> None:
    """Its last heartbeat still says ready. Another one takes the work, and that is no second attempt."""
    stages = world.add_all()
    stages[stage].die(tell=False)
    other = world.add(f"{stage}-1", stage)
    response = await world.ask([words("x"), picture()], headers={"X-Triptych-Trace": "1"})
    assert response.status_code == 200, response.text
    assert response.json()["triptych"]["attempts"] == 1
    assert other.seen


@pytest.mark.parametrize("num_bytes", [16 << 10, (16 << 10) + 1])
async def test_pictures_to_an_instance_that_is_gone(world: World, num_bytes: int) -> None:
    stages = world.add_all()
    dead = world.add("a-preprocess", "preprocess")  # its id comes first, so that it is tried first
    dead.die(tell=False)
    url = "data:image/png;base64," + base64.b64encode(bytes(num_bytes)).decode()
    response = await world.ask([picture(url)], headers={"X-Triptych-Trace": "1"})
    assert response.status_code == 200, response.text
    trace = response.json()["triptych"]
    assert trace["attempts"] == 1
    assert trace["stages"][0]["instance_id"] == stages["preprocess"].instance_id
    assert not dead.seen
    assert world.num_media == (num_bytes > 16 << 10), "a small file is a part of the message"


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_lost_in_the_middle(world: World, stream: bool) -> None:
    """What came of it is a part of the next attempt's prompt: nothing is lost, or said twice."""
    stages = world.add_all()

    async def half(request: DecodeRequest) -> Accepted:
        async def work() -> None:
            await stages["decode"].stream(request, world.answer_ids[1:5], end=False)
            world.add("decode-1", "decode")
            stages["decode"].tasks.clear()
            stages["decode"].die()

        stages["decode"].spawn(work())
        return Accepted()

    stages["decode"].hooks[DecodeRequest] = half
    response = await world.ask(stream=stream)
    assert response.status_code == 200
    again = stages["prefill"].seen[-1]
    assert again.num_output_tokens == 5
    assert unpack_tokens(again.prompt.inline)[-again.num_output_tokens :] == world.answer_ids[: again.num_output_tokens]
    if not stream:
        assert response.json()["choices"][0]["message"]["content"] == ANSWER
        assert response.json()["usage"]["completion_tokens"] == len(world.answer_ids)
        return
    found = events(response.text)
    assert text_of(found) == ANSWER
    assert found[-1] == "[DONE]"


@pytest.mark.parametrize("fault", ["gap", "error", "too many"])
async def test_a_broken_token_stream_is_an_error_not_an_end(world: World, fault: str) -> None:
    stages = world.add_all()
    decode = stages["decode"]

    async def broken(request: DecodeRequest) -> Accepted:
        async def work() -> None:
            await decode.send(request, 1, world.answer_ids[1:3])
            if fault == "gap":
                await decode.send(request, 4, world.answer_ids[4:5])
            elif fault == "error":
                await decode.send(request, 3, error=Overloaded("preempted for good").to_wire())
            else:
                await decode.send(request, 3, world.answer_ids[1:] * 10)

        decode.spawn(work())
        return Accepted()

    decode.hooks[DecodeRequest] = broken
    found = events((await world.ask(stream=True, max_tokens=20)).text)
    assert "error" in found[-1]
    assert "[DONE]" not in found


async def test_a_request_that_kills_whatever_it_touches_is_not_tried_for_ever(world: World) -> None:
    stages = world.add_all()
    killed: list[str] = []

    async def kill(request: Any) -> Any:
        killed.append(request.request_id)
        [victim] = [stage for stage in world.stages.values() if "prefill" in stage.stages]
        heir = world.add(f"prefill-{len(killed)}", "prefill")
        heir.hooks[PrefillRequest] = kill
        victim.die()
        await asyncio.Event().wait()

    stages["prefill"].hooks[PrefillRequest] = kill
    response = await world.ask()
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert len(killed) == world.settings.max_attempts == len(set(killed))


async def test_the_deadline(toy_checkpoint: Path) -> None:
    async with World(toy_checkpoint, request_timeout_s=0.3, stage_wait_s=10) as world:
        stages = world.add_all()

        async def hang(_request: Any) -> Any:
            await asyncio.Event().wait()

        stages["prefill"].hooks[PrefillRequest] = hang
        response = await world.ask()
        assert response.status_code == 504
        assert error_of(response)["code"] == "timeout"
        stages["prefill"].hooks.clear()

        async def accept(request: DecodeRequest) -> Accepted:
            await stages["decode"].send(request, 1, world.answer_ids[1:2])
            return Accepted()

        stages["decode"].hooks[DecodeRequest] = accept
        found = events((await world.ask(stream=True)).text)
        assert found[-1]["error"]["code"] == "timeout"
        await world.settled()


@pytest.mark.parametrize("stage", ["preprocess", "encoder", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_leaves(world: World, stage: str, stream: bool) -> None:
    """In whichever stage: the work stops and every instance that was touched is told to let go."""
    stages = world.add_all()
    kind = {"preprocess": PreprocessRequest, "encoder": EncodeRequest, "prefill": PrefillRequest, "decode": DecodeRequest}[
        stage
    ]
    cancelled = asyncio.Event()

    async def hang(_request: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    stages[stage].hooks[kind] = hang
    asking = asyncio.create_task(world.ask([words("x"), picture()], stream=stream))
    await until(lambda: any(isinstance(request, kind) for request in stages[stage].seen), f"in {stage}")
    asking.cancel()
    await asyncio.wait_for(cancelled.wait(), 5)
    await world.settled()
    request_id = stages[stage].seen[-1].request_id
    assert stages[stage].released == [request_id]
    assert stages["preprocess"].released == [request_id]
    assert 'triptych_requests_total{code="499",finish_reason=""} 1.0' in (await world.http.get("/metrics")).text


async def test_the_client_leaves_in_the_middle_of_a_stream(world: World) -> None:
    stages = world.add_all()

    async def some(request: DecodeRequest) -> Accepted:
        stages["decode"].spawn(stages["decode"].stream(request, world.answer_ids[1:4], end=False))
        return Accepted()

    stages["decode"].hooks[DecodeRequest] = some
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with world.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        first = await anext(lines)
        assert json.loads(first.removeprefix("data: "))["choices"]
    await world.settled()
    assert stages["decode"].released == [stages["decode"].seen[0].request_id]


async def test_decode_stays_where_the_kv_is(world: World) -> None:
    world.add("preprocess-0", "preprocess")
    both = world.add("both-0", "prefill", "decode")
    idle = world.add("decode-0", "decode")
    assert (await world.ask()).status_code == 200
    assert [type(request) for request in both.seen] == [PrefillRequest, DecodeRequest]
    assert not idle.seen
