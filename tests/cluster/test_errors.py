"""Every bad request gets the right status and an OpenAI error object that says what to do, and costs one attempt."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from support.cases import MODEL, Picture, chat
from support.client import ask, checked_error, session
from support.cluster import MAX_BODY_BYTES, Cluster
from support.reference import Reference
from support.watch import Watch

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, which all these wrong requests together leave at rest."""
    yield shared_cluster
    asyncio.run(_check_rest(shared_cluster))


async def _check_rest(cluster: Cluster) -> None:
    async with Watch(cluster.nats_url) as watch:
        await watch.until_at_rest(5, "after the wrong requests")


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def picture_body(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **fields}


@dataclass(frozen=True)
class Wrong:
    """A request, and what has to be said of it. says: what the message must contain, so that one knows what to do."""

    name: str
    body: dict[str, Any] | bytes
    status: int = 400
    code: str | None = None
    param: str | None = None
    says: str = ""


PICTURE_PARAM = "messages.[0].content.[1].image_url"
GOOD_JPEG = encoded(Image.effect_noise((64, 64), 50), "JPEG")
WRONG = [
    Wrong("not JSON", b'{"messages": [', says="JSON"),
    Wrong("not an object", b"[1, 2]"),
    Wrong("empty body", b""),
    Wrong("not UTF-8", b'{"messages": "\xff\xfe"}'),
    Wrong("no messages", {"model": MODEL, "max_tokens": 4}, param="messages", says="messages"),
    Wrong("empty messages", text_body(messages=[]), param="messages"),
    Wrong("messages is a string", text_body(messages="hi"), param="messages"),
    Wrong("unknown role", text_body(messages=[{"role": "king", "content": "hi"}]), param="messages.[0].role"),
    Wrong("unknown part", text_body(messages=[{"role": "user", "content": [{"type": "smell"}]}]), says="smell"),
    Wrong("image_url is a number", picture_body(7), param=f"{PICTURE_PARAM}.url"),  # type: ignore[arg-type]
    Wrong("max_tokens is text", text_body(max_tokens="many"), param="max_tokens"),
    Wrong("max_tokens 0", text_body(max_tokens=0), param="max_tokens"),
    Wrong("max_tokens -1", text_body(max_tokens=-1), param="max_tokens"),
    Wrong("n 0", text_body(n=0), param="n"),
    Wrong("n 0 in a stream", text_body(n=0, stream=True), param="n"),
    Wrong("temperature -1", text_body(temperature=-1), param="temperature"),
    Wrong(
        "temperature is not a number", b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    ),
    Wrong("unknown model", text_body(model="gpt-17"), 404, "model_not_found", "model", says="gpt-17"),
    Wrong(
        "prompt too long",
        text_body(messages=[{"role": "user", "content": "many words " * 60_000}]),
        400,
        "context_length_exceeded",
        "messages",
        says="token",
    ),
    Wrong("output too long", text_body(max_tokens=10_000_000), 400, "context_length_exceeded", says="token"),
    Wrong("body too large", text_body(user="x" * (MAX_BODY_BYTES + 1)), 413, "request_too_large"),
    Wrong("not a picture", picture_body(data_url(b"<svg></svg>")), 400, "invalid_image", PICTURE_PARAM),
    Wrong("empty picture", picture_body(data_url(b"")), 400, "invalid_image", PICTURE_PARAM),
    Wrong("cut JPEG", picture_body(data_url(GOOD_JPEG[:-200], "image/jpeg")), 400, "invalid_image", PICTURE_PARAM),
    Wrong("not base64", picture_body("data:image/png;base64,@@@"), 400, "invalid_image", PICTURE_PARAM),
    Wrong("thin picture", picture_body(data_url(encoded(Image.new("RGB", (1093, 5))))), 400, "invalid_image", PICTURE_PARAM),
    Wrong("thin picture in a stream", picture_body(data_url(encoded(Image.new("RGB", (1093, 5))))) | {"stream": True}, 400),
    Wrong(
        "huge picture", picture_body(data_url(encoded(Image.new("L", (12_000, 12_000))))), 400, "image_too_large", PICTURE_PARAM
    ),
    Wrong("file URL", picture_body("file:///etc/passwd"), 400, None, PICTURE_PARAM),
    Wrong("no such host", picture_body("http://no-such-host.invalid/x.png"), 400, "image_download_failed", PICTURE_PARAM),
    Wrong("loopback", picture_body("http://127.0.0.1:9/x.png"), 400, "image_download_failed", PICTURE_PARAM),
    Wrong("loopback in disguise", picture_body("http://0x7f.1/x.png"), 400, "image_download_failed", PICTURE_PARAM),
    Wrong("mapped loopback", picture_body("http://[::ffff:127.0.0.1]/x.png"), 400, "image_download_failed", PICTURE_PARAM),
    Wrong("metadata address", picture_body("http://169.254.169.254/latest"), 400, "image_download_failed", PICTURE_PARAM),
    Wrong("user in URL", picture_body("http://a@b@127.0.0.1/x.png"), 400, "image_download_failed", PICTURE_PARAM),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name.replace(" ", "-"))
async def test_a_wrong_request(cluster: Cluster, wrong: Wrong) -> None:
    content = wrong.body if isinstance(wrong.body, bytes) else json.dumps(wrong.body).encode()
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        response = await http.post(
            f"{cluster.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    assert response.status_code == wrong.status, response.text[:500]
    assert response.headers["content-type"].startswith("application/json"), "an error before the first token is no stream"
    error = checked_error(response.json())
    assert error["type"] == "invalid_request_error", error
    if wrong.code:
        assert error["code"] == wrong.code, error
    if wrong.param:
        assert error["param"] == wrong.param, error
    assert wrong.says in error["message"], error
    assert "127.0.0.1" not in error["message"], error
    assert "169.254" not in error["message"], error


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)])
async def test_a_wrong_route(cluster: Cluster, method: str, path: str, status: int) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        response = await http.request(method, cluster.url + path)
    assert response.status_code == status
    assert checked_error(response.json())["type"] == "invalid_request_error"


class CountingClient(openai.AsyncOpenAI):
    """The SDK with its default retries, counting what it sends."""

    def __init__(self, url: str) -> None:
        self.num_sent = 0

        async def count(_request: httpx.Request) -> None:
            self.num_sent += 1

        http = httpx.AsyncClient(event_hooks={"request": [count]}, timeout=TIMEOUT_S, trust_env=False)
        super().__init__(base_url=f"{url}/v1", api_key="none", http_client=http)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n 0", openai.BadRequestError),
        ("unknown model", openai.NotFoundError),
        ("body too large", openai.APIStatusError),
        ("cut JPEG", openai.BadRequestError),
        ("loopback", openai.BadRequestError),
        ("prompt too long", openai.BadRequestError),
        ("thin picture in a stream", openai.BadRequestError),
    ],
)
async def test_the_sdk_raises_the_right_error_and_does_not_try_again(
    cluster: Cluster, name: str, expected: type[openai.APIStatusError]
) -> None:
    [wrong] = [wrong for wrong in WRONG if wrong.name == name]
    assert isinstance(wrong.body, dict)
    async with CountingClient(cluster.url) as client:
        with pytest.raises(expected) as caught:
            await client.chat.completions.create(**wrong.body)
        assert client.num_sent == 1
    assert caught.value.status_code == wrong.status
    assert caught.value.code == wrong.code or wrong.code is None
    assert caught.value.param == wrong.param or wrong.param is None


async def test_a_wrong_request_does_not_hurt_its_neighbours(cluster: Cluster, reference: Reference) -> None:
    """Two good pictures beside a broken one: the request fails as a whole, and the next one is answered rightly."""
    good = Picture("image/jpeg", GOOD_JPEG)
    broken = Picture("image/jpeg", GOOD_JPEG[:100])
    async with session() as http:
        answer = await ask(http, cluster.url, chat(good, "and", broken, "and", good))
        assert (answer.status, (answer.error or {})["code"]) == (400, "invalid_image")
        assert (answer.error or {})["param"] == "messages.[0].content.[2].image_url"
        case = chat(good, "and", good, "and that?")
        assert reference.judge(case, await ask(http, cluster.url, case)) == "equal"


async def test_nulls_are_as_good_as_absent(cluster: Cluster) -> None:
    nulls = dict.fromkeys(["max_tokens", "max_completion_tokens", "temperature", "seed", "stream", "stop", "n", "user"])
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        body = text_body() | nulls | {"max_completion_tokens": 3}
        response = await http.post(f"{cluster.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 3


class _PictureSite(BaseHTTPRequestHandler):
    """A web site with one picture, one missing page, and one redirect to itself."""

    def do_GET(self) -> None:
        known = {"/picture.jpg": 200, "/loop": 302, "/text": 200}
        self.send_response(known.get(self.path, 404))
        body = GOOD_JPEG if self.path == "/picture.jpg" else b"some text"
        if self.path == "/loop":
            self.send_header("Location", "/loop")
        self.send_header("Content-Type", "image/jpeg" if self.path == "/picture.jpg" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _PictureSite)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()


async def test_a_picture_from_a_url(colocated_cluster: Cluster, reference: Reference, site: str) -> None:
    case = chat("What is", Picture("image/jpeg", GOOD_JPEG), max_tokens=8)
    body = case.body()
    body["messages"][0]["content"][1]["image_url"]["url"] = f"{site}/picture.jpg"
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        response = await http.post(f"{colocated_cluster.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == reference.answer(case).text


@pytest.mark.parametrize(
    ("path", "code"),
    [("/missing", "image_download_failed"), ("/loop", "image_download_failed"), ("/text", "invalid_image")],
)
async def test_a_url_without_a_picture(colocated_cluster: Cluster, site: str, path: str, code: str) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        response = await http.post(f"{colocated_cluster.url}/v1/chat/completions", json=picture_body(site + path))
    assert response.status_code == 400, response.text
    error = checked_error(response.json())
    assert (error["code"], error["param"]) == (code, PICTURE_PARAM)
    assert "127.0.0.1" not in error["message"]


async def test_a_url_where_nobody_listens(colocated_cluster: Cluster) -> None:
    unused = ThreadingHTTPServer(("127.0.0.1", 0), _PictureSite)
    unused.server_close()
    url = f"http://127.0.0.1:{unused.server_port}/x.png"
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
        response = await http.post(f"{colocated_cluster.url}/v1/chat/completions", json=picture_body(url))
    assert response.status_code == 400, response.text
    assert checked_error(response.json())["code"] == "image_download_failed"
