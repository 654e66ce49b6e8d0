"""The fields that say how an output is made: their bounds, what they become, and what each choice gets (robustness D)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.services.router.api_types import parse_chat
from triptych.services.router.completion_types import Completion, parse_completion
from triptych.services.router.sampling_fields import Generation, Terms
from triptych.shared.errors import BadRequest
from triptych.shared.settings import Settings

MAX_CHARS = 1000


def chat(**fields: Any) -> Generation:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), Settings(), MAX_CHARS).generation


def completion(prompt: Any = "hi", **fields: Any) -> Completion:
    return parse_completion(json.dumps({"prompt": prompt, **fields}).encode(), MAX_CHARS)


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": None}, "max_tokens", 5),
        ({"max_tokens": None}, "max_tokens", 0),
        ({"min_tokens": 5, "max_tokens": 5}, "min_tokens", 5),
        ({"min_tokens": 5}, "min_tokens", 5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_p": None}, "top_p", 1.0),
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"seed": -7}, "seed", -7),
        ({"stop_token_ids": [5, 6]}, "stop_token_ids", (5, 6)),
        ({"logprobs": True}, "num_logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "num_logprobs", 20),
        ({"logprobs": False, "top_logprobs": 0}, "num_logprobs", None),
        ({"logprobs": None, "top_logprobs": None}, "num_logprobs", None),
    ],
)
def test_what_a_field_becomes(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(chat(**fields).sampling, name) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Terms(b"", None)),
        ({"cache_salt": "", "slo_ttft_ms": None}, Terms(b"", None)),
        ({"cache_salt": "Tenant-1_b.c", "slo_ttft_ms": 250}, Terms(b"Tenant-1_b.c", 0.25)),
        ({"cache_salt": "x" * 128, "slo_ttft_ms": 1.5}, Terms(b"x" * 128, 0.0015)),
    ],
)
def test_terms(fields: dict[str, Any], expected: Terms) -> None:
    assert chat(**fields).terms == completion(**fields).generation.terms == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ("", ()), ([], ()), ("x", ("x",)), (["a", "b"], ("a", "b")), (["\n"] * 4, ("\n",) * 4)],
)
def test_stop_strings(stop: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 9, "max_completion_tokens": 5}, "min_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"cache_salt": "a\n"}, "cache_salt"),
        ({"cache_salt": "\u00e4"}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"slo_ttft_ms": 0}, "slo_ttft_ms"),
        ({"slo_ttft_ms": 3_600_001}, "slo_ttft_ms"),
        ({"slo_ttft_ms": "5"}, "slo_ttft_ms"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),  # 0 in float32, and a logit of 0 divided by that is no number
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop.[0]"),
        ({"stop": ["x" * 300]}, "stop.[0]"),
        ({"stop": [5]}, "stop.[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
def test_bounds(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_choices_have_seeds_of_their_own() -> None:
    generation = chat(seed=2**63 - 1, n=3)
    assert generation.num_choices == 3
    assert [generation.params(i, ()).seed for i in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert chat().sampling.seed != chat().sampling.seed


def test_the_models_own_end_counts_unless_ignored() -> None:
    assert chat(stop_token_ids=[5]).params(0, (5, 9)).stop_token_ids == (5, 9)
    assert chat(stop_token_ids=[5], ignore_eos=True).params(0, (9,)).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        ([], ([],)),
    ],
)
def test_prompts_of_plain_completions(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert completion(prompt).prompts == expected


def test_defaults_of_plain_completions() -> None:
    sampling = completion().generation.sampling
    assert (sampling.max_tokens, sampling.num_logprobs) == (16, None)
    assert completion(logprobs=3, max_tokens=2).generation.sampling.num_logprobs == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.[1]"),
        ({"prompt": [1, "a"]}, "prompt.[1]"),
        ({"prompt": [[1], "a"]}, "prompt.[1]"),
        ({"prompt": [-1]}, "prompt.[0]"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 8}, "n"),
        ({"prompt": "a" * (MAX_CHARS + 1)}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_bounds_of_plain_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion(json.dumps(fields).encode(), MAX_CHARS)
    assert (caught.value.status, caught.value.param) == (400, param)
