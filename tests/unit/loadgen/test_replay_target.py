"""Which server is meant, and what is sent to it as a key."""

from __future__ import annotations

import pytest

from triptych.loadgen.replay.target import auth_headers, base_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" http://localhost:8000/ ", "http://localhost:8000"),
        ("https://api.openai.com/v1/", "https://api.openai.com"),
        ("http://x/v1/chat/completions", "http://x"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
    ],
)
def test_urls(given: str, url: str) -> None:
    assert base_url(given) == url


@pytest.mark.parametrize(
    "given",
    ["", "http://", "ftp://x", "http://[::1", "http://x:99999", "http://x:0", "http://x:y", "http://x/?a=b", "http://x/#a"],
)
def test_urls_of_no_server(given: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        base_url(given)


def test_a_password_is_not_kept_in_the_results() -> None:
    with pytest.raises(ValueError, match="--header") as raised:
        base_url("http://somebody:hush@x")
    assert "hush" not in str(raised.value)


def test_keys() -> None:
    assert auth_headers({}) == auth_headers({"OPENAI_API_KEY": " "}) == {}
    assert auth_headers({"OPENAI_API_KEY": "k\n"}) == {"Authorization": "Bearer k"}
    with pytest.raises(ValueError, match="no header") as raised:
        auth_headers({"OPENAI_API_KEY": "hush\nX: y"})
    assert "hush" not in str(raised.value)
