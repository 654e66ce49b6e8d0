"""Downloads of media from http(s) URLs that clients send. SSRF-safe: names are resolved here, every address is checked, and
the connection goes to the checked address (addresses.py); each redirect again. Proxies and environment are ignored.

One time budget covers all hops; bytes are bounded while they stream; error texts never hold an address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from triptych.services.preprocess.addresses import UrlRefused, is_public, parse_url
from triptych.services.preprocess.media import MediaBuffer
from triptych.shared.errors import BadRequest

MAX_REDIRECTS = 3
MAX_ADDRESSES = 3  # chosen: how many of a name's addresses are tried
MAX_CONNECTIONS = 64  # chosen: downloads at a time
NUM_RESOLVERS = 8  # chosen: threads of their own, so that slow name servers block nothing else
_REDIRECTS = (301, 302, 303, 307, 308)
_DEFAULT_PORTS = {"http": 80, "https": 443}

TIMEOUT_TEXT = "the image could not be downloaded in time"
UNREACHABLE_TEXT = (
    "the image could not be downloaded: its address is not reachable, or not allowed; a data: URL needs no download"
)
REDIRECTS_TEXT = "the image could not be downloaded: too many redirects"
BROKEN_TEXT = "the image could not be downloaded: the server's answer broke off"
COMPRESSED_TEXT = "the image could not be downloaded: the server sent it in a content encoding"
TOO_LARGE_TEXT = "the image could not be downloaded: the file is too large"

Resolver = Callable[[str, int], list[str]]


class _FetchFailed(Exception):
    """args[0] is safe to show."""


def resolve(host: str, port: int) -> list[str]:
    """All addresses of a name, in the system's order. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class MediaFetcher:
    """is_allowed and resolver are given in tests only."""

    def __init__(self, timeout_s: float, is_allowed: Callable[[str], bool] = is_public, resolver: Resolver = resolve) -> None:
        self._timeout_s = timeout_s
        self._is_allowed = is_allowed
        self._resolver = resolver
        self._executor = ThreadPoolExecutor(NUM_RESOLVERS, thread_name_prefix="resolve")
        # The bare transport: no cookies, no auth, no redirects of its own. No connection is kept: one that was made for a
        # name must not serve another name at the same address.
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._transport = httpx.AsyncHTTPTransport(verify=True, trust_env=False, limits=limits)

    async def fetch(self, url: str, buffer: MediaBuffer, param: str) -> None:
        """Download into `buffer`. Waiting behind other downloads takes nothing of this one's time: that is not the fault of
        the client who named it. The caller bounds the whole.

        Raises:
            BadRequest: image_download_failed, whatever went wrong out there.
            Overloaded: the media store is full.
        """
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                await self._follow(url, buffer)
        except (TimeoutError, httpx.TimeoutException):
            text = TIMEOUT_TEXT
        except (_FetchFailed, UrlRefused) as error:
            text = str(error)
        except httpx.HTTPError:
            text = BROKEN_TEXT
        else:
            return
        raise BadRequest(text, code="image_download_failed", param=param)

    async def _follow(self, url: str, buffer: MediaBuffer) -> None:
        target = parse_url(url)
        for _ in range(MAX_REDIRECTS + 1):
            location = await self._get(target, buffer)
            if location is None:
                return
            target = parse_url(location, target)
        raise _FetchFailed(REDIRECTS_TEXT)

    async def _get(self, target: httpx.URL, buffer: MediaBuffer) -> str | None:
        """Where it redirects to, or None when the body is in `buffer`."""
        response = await self._connect(target)
        try:
            location = response.headers.get("location")
            if response.status_code in _REDIRECTS and location:
                return str(location)
            if response.status_code != 200:
                raise _FetchFailed(f"the image could not be downloaded: the server answered {response.status_code}")
            await self._read(response, buffer)
            return None
        finally:
            await response.aclose()

    async def _connect(self, target: httpx.URL) -> httpx.Response:
        for address in (await self._addresses(target))[:MAX_ADDRESSES]:
            try:
                return await self._transport.handle_async_request(self._pinned(target, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        raise _FetchFailed(UNREACHABLE_TEXT)

    async def _addresses(self, target: httpx.URL) -> list[str]:
        """Of the target's host; all of them must be allowed, or an attacker's name could mix in one that is not."""
        host, port = target.raw_host.decode(), target.port or _DEFAULT_PORTS[target.scheme]
        try:
            addresses = await asyncio.get_running_loop().run_in_executor(self._executor, self._resolver, host, port)
        except (OSError, UnicodeError):
            raise _FetchFailed(UNREACHABLE_TEXT) from None
        if not all(self._is_allowed(address) for address in addresses):
            raise _FetchFailed(UNREACHABLE_TEXT)
        return addresses

    def _pinned(self, target: httpx.URL, address: str) -> httpx.Request:
        """A request that connects to `address`; Host header, TLS name and certificate check stay those of the target."""
        times = {"connect": self._timeout_s / MAX_ADDRESSES} | dict.fromkeys(("read", "write", "pool"), self._timeout_s)
        headers = {"Host": target.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "triptych"}
        extensions = {"timeout": times, "sni_hostname": target.raw_host.decode()}
        return httpx.Request("GET", target.copy_with(host=address), headers=headers, extensions=extensions)

    async def _read(self, response: httpx.Response, buffer: MediaBuffer) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _FetchFailed(COMPRESSED_TEXT)  # asked for identity; unpacking is how small answers become huge ones
        announced = response.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > buffer.max_bytes:
            raise _FetchFailed(TOO_LARGE_TEXT)
        async for chunk in response.aiter_raw():
            if len(buffer.data) + len(chunk) > buffer.max_bytes:
                raise _FetchFailed(TOO_LARGE_TEXT)
            buffer.append(chunk)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self._transport.aclose()
