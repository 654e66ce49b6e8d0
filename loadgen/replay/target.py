"""The server that a trace is replayed against: who it is and which model it serves, found out before anything is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from triptych.shared.instance_info import Emulation

PROBE_TIMEOUT_S = 5.0  # chosen: a server under load answers these late, a dead one never
API_KEY_VARIABLE = "OPENAI_API_KEY"


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
    """With http:// where nothing is said, without /v1 at the end, which OpenAI's clients want."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def auth_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """With the API key of the environment, if there is one."""
    key = environment.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


async def find_target(http: aiohttp.ClientSession, url: str, model: str | None) -> Target:
    """Which model is served, unless it's named, and in which version.

    Raises:
        TargetFailed: no server, or no model.
    """
    try:
        models = _entries(await _get(http, f"{url}/v1/models"))
        told = await _get(http, f"{url}/version") if models or model else None
    except (aiohttp.ClientError, OSError) as error:
        raise TargetFailed(f"no server answers at {url}: {str(error) or type(error).__name__}") from None
    names = [str(entry["id"]) for entry in models]
    if model is None and not names:
        raise TargetFailed(f"{url}/v1/models names no model: is the server ready? --model names one that it does not list")
    if model is not None and names and model not in names:
        raise TargetFailed(f"{url} has no model {model!r}, but {', '.join(names)}")
    name = model or names[0]
    entry = next((entry for entry in models if entry["id"] == name), {})
    length = entry.get("max_model_len")
    return Target(
        url=url,
        model=name,
        version=str(told["version"]) if isinstance(told, dict) and "version" in told else "unknown",
        max_model_len=length if isinstance(length, int) else None,
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


async def _get(http: aiohttp.ClientSession, url: str) -> object:
    """None where the answer is no JSON, or not OK."""
    async with asyncio.timeout(PROBE_TIMEOUT_S), http.get(url) as response:
        try:
            return msgspec.json.decode(await response.read()) if response.status == 200 else None
        except msgspec.DecodeError:
            return None
