"""Clients that people put in front of such a server: litellm, langchain-openai, and schemathesis on the API's description.

None is a dependency: each test runs where its client can be imported (`pip install litellm langchain-openai schemathesis`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cases import MODEL, random_case
from support.cluster import Cluster, wait_for
from support.reference import Reference

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # theirs
]
SCHEMATHESIS_TIMEOUT_S = 600


@pytest.fixture
def litellm() -> Any:
    return pytest.importorskip("litellm")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(cluster: Cluster, litellm: Any, reference: Reference, provider: str) -> None:
    """Answer, stream with usage exactly once, and a typed error."""
    case = random_case(8000, 1)
    expected = reference.answer(case)
    body = {**case.body(), "model": f"{provider}/{MODEL}", "api_base": f"{cluster.url}/v1", "api_key": "none"}
    answer = litellm.completion(**body)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == len(expected.token_ids)
    chunks = list(litellm.completion(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [usage.completion_tokens for usage in usages] == [len(expected.token_ids)]
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**body, "temperature": 5})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**body, "model": f"{provider}/another"})


def test_langchain(cluster: Cluster, reference: Reference) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    openai = pytest.importorskip("openai")
    case = random_case(8001, 1)
    expected = reference.answer(case)
    options = {
        "model": MODEL,
        "base_url": f"{cluster.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": case.max_tokens,
    }
    chat = langchain_openai.ChatOpenAI(**options, stream_usage=True)
    messages = case.body()["messages"]
    answer = chat.invoke(messages)
    assert answer.content == expected.text
    assert answer.usage_metadata["output_tokens"] == len(expected.token_ids)
    pieces = list(chat.stream(messages))
    assert "".join(piece.content for piece in pieces) == expected.text
    usages = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    assert sum(usages) == len(expected.token_ids)
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]["content"]
    assert len(told) == len(expected.token_ids)
    with pytest.raises(openai.NotFoundError):
        langchain_openai.ChatOpenAI(**{**options, "model": "another"}, max_retries=0).invoke("hi")


@pytest.mark.timeout(SCHEMATHESIS_TIMEOUT_S)
def test_schemathesis_finds_no_500(start_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Against a short context: most of what it makes up asks for as long an output as fits. A first token that it wants within
    a millisecond is refused with 503, as it should be."""
    pytest.importorskip("schemathesis")
    cluster = start_cluster(TRIPTYCH_MAX_MODEL_LEN="96")
    wait_for(cluster.is_ready, 60, "every stage")
    (tmp_path / "schemathesis.toml").write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "503"]\n'
    )
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{cluster.url}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", "60", "--request-timeout", "60", "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SCHEMATHESIS_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
