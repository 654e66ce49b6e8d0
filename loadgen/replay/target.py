"""The server that a trace is replayed against: who it is and which model it serves, found out before anything is measured."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from triptych.loadgen.undecodable import UNDECODABLE
from triptych.shared.instance_info import Emulation

PROBE_TIMEOUT_S = 5.0  # chosen: a server under load answers these late, a dead one never
MAX_LISTED_BYTES = 4 << 20  # of /v1/models; chosen: the largest providers list hundreds of models in under 1 MB
MAX_NAMED = 10  # models in a message; chosen
API_KEY_VARIABLE = "OPENAI_API_KEY"
WANTS_KEY = (401, 403)  # statuses


class TargetFailed(Exception):
    """The target isn't there, or isn't what it should be. The text is for the user."""


@dataclass(frozen=True, slots=True)
class Target:
    """url: without /v1. version: as the server tells, or unknown. max_model_len: in tokens, where it says so. label: real, or
    what else it says that it is."""

    url: str
    model: str
    version: str = "unknown"
    max_model_len: int | None = None
    label: str = "real"


def base_url(text: str) -> str:
    """With http:// where nothing is said, without /v1 at the end, which OpenAI's clients want. Raises ValueError."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError("a name and a password in it would be in the results: give them by --header")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.port == 0:
        raise ValueError(f"{text!r} is no server's URL, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")


def auth_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """With the API key of the environment, if there is one. Raises ValueError, which doesn't show it."""
    key = environment.get(API_KEY_VARIABLE, "").strip()
    if not key.isprintable():
        raise ValueError("the key has characters that no header can have")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class _Answer:
    """content: None where it is no JSON, or not OK."""

    status: int
    content: object
    moved_to: str

    @property
    def why(self) -> str:
        """Why it may name no model, and what to do."""
        if self.status in WANTS_KEY:
            return f"status {self.status}, is the key in {API_KEY_VARIABLE} or --header right?"
        if self.moved_to:
            return f"it redirects to {self.moved_to}, is that the target?"
        return "is the server ready?" if self.status == HTTPStatus.OK else f"status {self.status}, is the server ready?"


async def find_target(http: aiohttp.ClientSession, url: str, model: str | None) -> Target:
    """Which model is served, unless it's named, and in which version.

    Raises:
        TargetFailed: no server, or no model.
    """
    try:
        answer = await _get(http, f"{url}/v1/models")
        models = _entries(answer.content)
        told = (await _get(http, f"{url}/version")).content if models or model else None
    except (aiohttp.ClientError, OSError) as error:
        raise TargetFailed(f"no server answers at {url}: {str(error) or type(error).__name__}") from None
    names = [str(entry["id"]) for entry in models]
    if model is None and not names:
        raise TargetFailed(f"the server at {url} names no model: {answer.why} --model names one that it does not list")
    if model is not None and names and model not in names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise TargetFailed(f"the server at {url} has no model {model!r}, but {', '.join(names[:MAX_NAMED])}{more}")
    name = model or names[0]
    entry = next((entry for entry in models if entry["id"] == name), {})
    length = entry.get("max_model_len")
    return Target(
        url=url,
        model=name,
        version=str(told["version"]) if isinstance(told, dict) and "version" in told else "unknown",
        max_model_len=length if type(length) is int and length > 0 else None,
        label=_label(entry.get("emulated")),
    )


async def is_there(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether anything answers."""
    try:
        await _get(http, f"{url}/v1/models")
    except (aiohttp.ClientError, OSError):  # TimeoutError is one
        return False
    return True


def _entries(answer: object) -> list[dict[str, Any]]:
    data = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in data if isinstance(entry, dict) and "id" in entry] if isinstance(data, list) else []


def _label(emulated: object) -> str:
    """What every output says of figures that no real GPU made."""
    if not emulated:
        return "real"
    try:
        return str(msgspec.convert(emulated, Emulation))
    except msgspec.ValidationError:
        return "emulated"


async def read_at_most(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    """All of a body, or its beginning: nobody knows what a server sends."""
    try:
        return await response.content.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        return error.partial


async def _get(http: aiohttp.ClientSession, url: str) -> _Answer:
    async with asyncio.timeout(PROBE_TIMEOUT_S), http.get(url, allow_redirects=False) as response:
        content = None
        if response.status == HTTPStatus.OK:
            with contextlib.suppress(*UNDECODABLE):
                content = msgspec.json.decode(await read_at_most(response, MAX_LISTED_BYTES))
        return _Answer(response.status, content, response.headers.get("Location", ""))
