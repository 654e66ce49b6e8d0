"""Downloads against real servers on loopback: what is fetched, what is refused, and that checks hold at every hop.

127.0.0.1 stands for the public internet here (`is_allowed`), other loopback addresses for what must not be reached.
"""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from triptych.services.preprocess import fetch as fetch_module
from triptych.services.preprocess.addresses import is_public
from triptych.services.preprocess.fetch import (
    BROKEN_TEXT,
    COMPRESSED_TEXT,
    REDIRECTS_TEXT,
    TIMEOUT_TEXT,
    TOO_LARGE_TEXT,
    UNREACHABLE_TEXT,
    MediaFetcher,
)
from triptych.services.preprocess.media import MediaBuffer, MediaStore
from triptych.shared.errors import BadRequest, Overloaded

BODY = bytes(range(256)) * 40
MAX_BYTES = 20_000
PARAM = "messages.[0].content.[0].image_url"


class Site:
    """A small web server that remembers the requests it got."""

    def __init__(self) -> None:
        self.requests: list[web.BaseRequest] = []
        self.handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] = self._body
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        self.port = 0

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        return await self.handler(request)

    async def _body(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=BODY, content_type="image/png")

    def url(self, host: str = "127.0.0.1", path: str = "/a.png") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    await made.start()
    yield made
    await made.stop()


Fetch = Callable[..., Awaitable[bytes]]


@pytest.fixture
async def fetch() -> AsyncIterator[Fetch]:
    """fetch(url, **options of MediaFetcher) -> the bytes. Checks that nothing stays in the store, whatever the end."""
    fetchers: list[MediaFetcher] = []
    store = MediaStore(10 * MAX_BYTES, MAX_BYTES, expiry_s=60)

    async def get(url: str, **options: object) -> bytes:
        given = {"timeout_s": 10.0, "is_allowed": lambda address: address == "127.0.0.1"} | options
        fetchers.append(MediaFetcher(**given))
        with MediaBuffer(store) as buffer:
            await fetchers[-1].fetch(url, buffer, PARAM)
            return bytes(buffer.data)

    yield get
    for fetcher in fetchers:
        await fetcher.close()
    assert store.num_bytes == 0


async def _refused(fetched: Awaitable[bytes]) -> str:
    """The text. Every refusal has one code and no address in it."""
    with pytest.raises(BadRequest) as caught:
        await fetched
    error = caught.value
    assert (error.code, error.status, error.param) == ("image_download_failed", 400, PARAM)
    assert not any(word in error.message for word in ("127", "::", "localhost", "a.png", "http:", "Errno", "0x"))
    return error.message


# --- what works -------------------------------------------------------------------------------------------------------------


async def test_body_and_headers(site: Site, fetch: Fetch) -> None:
    assert await fetch(site.url(path="/a.png?x=%20y#part")) == BODY
    [request] = site.requests
    assert request.path_qs == "/a.png?x=%20y"
    assert request.headers["Host"] == f"127.0.0.1:{site.port}"
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in request.headers


async def test_name_is_resolved_once_and_kept_in_the_host_header(site: Site, fetch: Fetch) -> None:
    """A name server that answers differently the second time (rebinding) is not asked a second time."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    asked: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    assert await fetch(site.url("pictures.example"), resolver=resolver) == BODY
    assert asked == ["pictures.example"]
    assert site.requests[0].headers["Host"] == f"pictures.example:{site.port}"


async def test_next_address_is_tried(site: Site, fetch: Fetch) -> None:
    """The first one refuses connections: nothing listens there."""
    assert (
        await fetch(
            site.url("pictures.example"),
            resolver=lambda host, port: ["127.0.0.3", "127.0.0.1"],
            is_allowed=lambda address: True,
        )
        == BODY
    )


async def test_redirects_are_followed(site: Site, fetch: Fetch) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        step = int(request.path.strip("/"))
        if step == 3:
            return web.Response(body=BODY)
        location = site.url(path=f"/{step + 1}") if step % 2 else f"/{step + 1}"
        return web.Response(status=(301, 302, 307)[step], headers={"Location": location, "Set-Cookie": "a=b"})

    site.handler = handler
    assert await fetch(site.url(path="/0")) == BODY
    assert [request.path for request in site.requests] == ["/0", "/1", "/2", "/3"]
    assert not any("Cookie" in request.headers for request in site.requests)


async def test_environment_proxies_are_ignored(site: Site, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await fetch(site.url()) == BODY


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f.1", "0", "[::1]", "[::ffff:127.0.0.1]", "[::]"],
)
async def test_spellings_of_loopback_are_refused_by_default(site: Site, fetch: Fetch, host: str) -> None:
    assert await _refused(fetch(site.url(host), is_allowed=is_public)) == UNREACHABLE_TEXT
    assert site.requests == []


async def test_one_bad_address_among_good_ones_is_refused(site: Site, fetch: Fetch) -> None:
    mixed = ["127.0.0.1", "10.0.0.1"]
    assert await _refused(fetch(site.url("pictures.example"), resolver=lambda host, port: mixed)) == UNREACHABLE_TEXT
    assert site.requests == []


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:{port}/b",
        "http://127.0.0.2/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "//127.0.0.2:{port}/",
        "http://10.0.0.1/",
    ],
)
async def test_redirect_to_a_private_address_is_refused(site: Site, fetch: Fetch, location: str) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": location.format(port=site.port)})

    site.handler = handler
    assert await _refused(fetch(site.url())) == UNREACHABLE_TEXT
    assert len(site.requests) == 1


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/", "http://a@127.0.0.1/", "http://127.0.0.1\\@b/"])
async def test_redirect_to_another_kind_of_url_is_refused(site: Site, fetch: Fetch, location: str) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": location})

    site.handler = handler
    await _refused(fetch(site.url()))
    assert len(site.requests) == 1


async def test_redirect_loop_ends(site: Site, fetch: Fetch) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": request.path})

    site.handler = handler
    assert await _refused(fetch(site.url())) == REDIRECTS_TEXT
    assert len(site.requests) == 4


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500, 503])
async def test_other_statuses_are_named(site: Site, fetch: Fetch, status: int) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status)

    site.handler = handler
    assert str(status) in await _refused(fetch(site.url()))


async def test_too_large_by_its_header_is_not_read(site: Site, fetch: Fetch) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=bytes(MAX_BYTES + 1))

    site.handler = handler
    assert await _refused(fetch(site.url())) == TOO_LARGE_TEXT


async def test_too_large_while_streaming_is_cut(site: Site, fetch: Fetch) -> None:
    """An endless body without a length."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(4096))
        except ConnectionError:
            cut.set()
        return response

    cut = asyncio.Event()
    site.handler = handler
    assert await _refused(fetch(site.url())) == TOO_LARGE_TEXT
    await asyncio.wait_for(cut.wait(), 10)


async def test_largest_allowed_body_passes(site: Site, fetch: Fetch) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=bytes(MAX_BYTES))

    site.handler = handler
    assert len(await fetch(site.url())) == MAX_BYTES


async def test_compressed_answers_are_refused(site: Site, fetch: Fetch) -> None:
    """A gzip of zeros grows a thousandfold."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"})

    site.handler = handler
    assert await _refused(fetch(site.url())) == COMPRESSED_TEXT


@pytest.mark.parametrize("where", ["headers", "body", "redirects"])
async def test_one_time_budget_for_everything(site: Site, fetch: Fetch, where: str) -> None:
    """Slow headers, a body that drips, and slow redirects that each stay under the bound."""
    go_on = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if where == "headers":
            await asyncio.wait_for(go_on.wait(), 30)
        if where == "redirects":
            await asyncio.sleep(0.15)
            return web.Response(status=302, headers={"Location": f"{request.path}x"})
        response = web.StreamResponse()
        await response.prepare(request)
        while not go_on.is_set():
            await response.write(b"x")
            await asyncio.sleep(0.05)
        return response

    site.handler = handler
    begun_at_s = time.monotonic()
    try:
        assert await _refused(fetch(site.url(), timeout_s=0.4)) == TIMEOUT_TEXT
    finally:
        go_on.set()
    assert time.monotonic() - begun_at_s < 5


async def test_waiting_behind_slow_downloads_is_no_fault_of_the_url(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "MAX_CONNECTIONS", 2)
    go_on = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/slow":
            await asyncio.wait_for(go_on.wait(), 30)
        return web.Response(body=BODY)

    site.handler = handler
    store = MediaStore(10 * MAX_BYTES, MAX_BYTES, expiry_s=60)
    fetcher = MediaFetcher(0.4, is_allowed=lambda address: address == "127.0.0.1")
    with MediaBuffer(store) as first, MediaBuffer(store) as second, MediaBuffer(store) as third:
        slow = [asyncio.create_task(fetcher.fetch(site.url(path="/slow"), buffer, PARAM)) for buffer in (first, second)]
        await asyncio.sleep(0)
        await fetcher.fetch(site.url(), third, PARAM)
        assert bytes(third.data) == BODY
        go_on.set()
        ended = await asyncio.gather(*slow, return_exceptions=True)
    assert [type(end) for end in ended] == [BadRequest, BadRequest]
    await fetcher.close()


async def test_slow_name_server_is_cut_off(site: Site, fetch: Fetch) -> None:
    go_on = threading.Event()

    def resolver(host: str, port: int) -> list[str]:
        go_on.wait(10)
        return ["127.0.0.1"]

    try:
        assert await _refused(fetch(site.url("pictures.example"), resolver=resolver, timeout_s=0.2)) == TIMEOUT_TEXT
    finally:
        go_on.set()
    assert site.requests == []


async def test_broken_off_body_is_refused(site: Site, fetch: Fetch) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    site.handler = handler
    assert await _refused(fetch(site.url())) == BROKEN_TEXT


async def test_nothing_listens(site: Site, fetch: Fetch) -> None:
    url = site.url()
    await site.stop()
    assert await _refused(fetch(url)) == UNREACHABLE_TEXT


@pytest.mark.parametrize("failure", [OSError("no such name 127.0.0.1"), UnicodeError("label too long")])
async def test_names_that_do_not_resolve(site: Site, fetch: Fetch, failure: Exception) -> None:
    def resolver(host: str, port: int) -> list[str]:
        raise failure

    assert await _refused(fetch(site.url("pictures.example"), resolver=resolver)) == UNREACHABLE_TEXT


async def test_plain_text_where_tls_is_expected(site: Site, fetch: Fetch) -> None:
    assert await _refused(fetch(site.url().replace("http", "https"))) == UNREACHABLE_TEXT


async def test_tls_asks_for_the_name_not_the_address(fetch: Fetch) -> None:
    """The server's certificate is checked against the same name. What listens here only reads the ClientHello."""
    hellos: list[bytes] = []

    async def read_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hellos.append(await asyncio.wait_for(reader.read(4096), 10))
        writer.close()

    server = await asyncio.start_server(read_hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        url = f"https://pictures.example:{port}/a.png"
        assert await _refused(fetch(url, resolver=lambda host, port: ["127.0.0.1"])) == UNREACHABLE_TEXT
    [hello] = hellos
    assert b"pictures.example" in hello


async def test_full_store_is_overload_not_the_clients_fault(site: Site) -> None:
    store, fetcher = MediaStore(100, MAX_BYTES, expiry_s=60), MediaFetcher(10.0, is_allowed=lambda address: True)
    with MediaBuffer(store) as buffer, pytest.raises(Overloaded):
        await fetcher.fetch(site.url(), buffer, PARAM)
    await fetcher.close()
    assert store.num_bytes == 0
