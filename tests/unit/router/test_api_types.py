"""What chat requests are taken, and what is said about those that aren't."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.services.router.api_types import Chat, ChatCompletionRequest, ChatTurn, ImageInput, parse_chat
from triptych.services.router.sampling_fields import Generation
from triptych.shared.errors import BadRequest
from triptych.shared.sampling_params import SamplingParams
from triptych.shared.settings import Settings

SETTINGS = Settings(max_images=3, max_messages=5)
MAX_CHARS = 1000
URL = "http://pictures.test/a.png"


def parse(**fields: Any) -> Chat:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), SETTINGS, MAX_CHARS)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def messages(*contents: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for content in contents]}


def picture(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_defaults() -> None:
    chat = parse()
    assert chat.turns == (ChatTurn("user", "hi"),)
    generation = chat.generation
    assert generation.sampling == SamplingParams(max_tokens=0, temperature=1.0, seed=generation.sampling.seed)
    assert generation == Generation(generation.sampling, False, (), 1, False, False)


def test_order_of_text_and_images_is_kept() -> None:
    content = [
        {"type": "text", "text": "a"},
        picture("data:,x"),
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": URL},
    ]
    chat = parse(**messages(content))
    assert chat.turns == (ChatTurn("user", ("a", None, "b", None)),)
    assert chat.images == (
        ImageInput("data:,x", "messages.[0].content.[1].image_url"),
        ImageInput(URL, "messages.[0].content.[3].image_url"),
    )


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_images_in_any_role(role: str) -> None:
    assert len(parse(**messages([picture()], role=role)).images) == 1


def test_odd_but_valid_messages() -> None:
    told = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
    ]
    chat = parse(messages=told)
    assert chat.turns == (
        ChatTurn("system", "be brief"),
        ChatTurn("assistant", ""),
        ChatTurn("tool", "42"),
        ChatTurn("assistant", ""),
        ChatTurn("assistant", ()),
    )


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in ChatCompletionRequest.model_fields if name != "messages"] + ["tools", "user", "made_up"]
    chat = parse(**{**dict.fromkeys(names), "seed": 5})
    assert chat == dataclasses.replace(parse(seed=5), model="")


def test_harmless_fields_are_taken() -> None:
    parse(
        user="u",
        metadata={"a": "b"},
        store=True,
        seed=7,
        service_tier="auto",
        parallel_tool_calls=True,
        cache_salt="x",
        n=1,
        top_p=1.0,
        top_k=-1,
        stop=[],
        logprobs=False,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        presence_penalty=0,
        repetition_penalty=1.0,
        made_up={"deep": [1]},
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"1": 2}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("response_format", "json"),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_not_ignored(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert "not supported yet" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, "messages.[1].content"),
        (messages([{"type": "text", "text": 5}]), "messages.[0].content.[0].text"),
        (messages([picture(7)]), "messages.[0].content.[0].image_url.url"),
        (messages([{"type": "image_url", "image_url": 7}]), "messages.[0].content.[0].image_url"),
        (messages([{"type": "image_url"}]), "messages.[0].content.[0].image_url"),
        (messages([{"type": "video_url", "video_url": {"url": URL}}]), "messages.[0].content.[0]"),
        (messages(["text"]), "messages.[0].content.[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"model": 5}, "model"),
        (messages([picture()] * 4), "messages"),
        (messages(*["x"] * 6), "messages"),
        (messages("x" * (MAX_CHARS + 1)), "messages"),
    ],
)
def test_the_field_that_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert len(error.message) < 300, "what was sent is not repeated"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b'{"temperature": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_a_json_object(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(body, SETTINGS, MAX_CHARS)
    assert caught.value.code == "invalid_json"


def test_lone_surrogates_are_refused() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b"}]}'
    with pytest.raises(BadRequest):
        parse_chat(body, SETTINGS, MAX_CHARS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*ChatCompletionRequest.model_fields, "tools", "response_format"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5))
def test_whatever_is_sent_is_taken_or_refused_with_a_400(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest):
        parse(**fields)


parts = st.dictionaries(st.sampled_from(["type", "text", "image_url"]), json_values | st.sampled_from(["text", "image_url"]))
odd_messages = st.dictionaries(st.sampled_from(["role", "content", "name"]), json_values | st.just("user") | st.lists(parts))


@given(st.lists(odd_messages, max_size=3))
def test_whatever_messages_are_sent_are_taken_or_refused_with_a_400(told: list[Any]) -> None:
    with contextlib.suppress(BadRequest):
        parse(messages=told)
