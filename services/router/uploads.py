"""Bytes that must not ride on the bus, sent by HTTP to a preprocess instance: media of data: URLs, and very long prompts."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from triptych.shared.errors import (
    UNREACHABLE,
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    Overloaded,
    TriptychError,
    WireError,
    from_wire,
)
from triptych.shared.messages import Heartbeat, InstanceId, RequestId, TensorRef

MAX_CONNECTIONS = 256  # chosen: uploads at once; one more waits for its turn
CONNECT_TIMEOUT_S = 2.0  # chosen: same host or same network
KEEP_ALIVE_S = 20.0  # chosen: less than the servers keep idle connections, so that they never close one in use


class Uploader:
    """One pool of connections. Use it on one event loop and `close` it."""

    def __init__(self, router_id: InstanceId) -> None:
        self._router_id = router_id
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=32, keepalive_expiry=KEEP_ALIVE_S),
            follow_redirects=False,
            trust_env=False,
        )

    async def media(self, beat: Heartbeat, request_id: RequestId, content: bytes, timeout_s: float) -> str:
        """Leave an encoded image at `beat`'s instance; the media_id to name it by.

        Raises:
            InstanceLost: nobody answers there.
            TriptychError: what it answered.
        """
        answer = await self._post(beat, "/media", request_id, content, timeout_s)
        media_id = answer.get("media_id")
        if not isinstance(media_id, str):
            raise InternalError("a preprocess instance answered an upload with something else")
        return media_id

    async def blob(self, beat: Heartbeat, request_id: RequestId, content: bytes, timeout_s: float) -> TensorRef:
        """Leave bytes at `beat`'s instance as a uint8 tensor. Raises as `media` does."""
        answer = await self._post(beat, "/blobs", request_id, content, timeout_s)
        try:
            return msgspec.convert(answer, TensorRef)
        except msgspec.ValidationError as error:
            raise InternalError("a preprocess instance answered an upload with something else") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(
        self, beat: Heartbeat, path: str, request_id: RequestId, content: bytes, timeout_s: float
    ) -> dict[str, Any]:
        headers = {
            "content-type": "application/octet-stream",
            "x-request-id": request_id,
            "x-router-id": self._router_id,
        }
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            response = await self._client.post(beat.http_url + path, content=content, headers=headers, timeout=timeout)
        except (httpx.PoolTimeout, httpx.ReadTimeout, httpx.WriteTimeout):
            raise DeadlineExceeded() from None
        except httpx.HTTPError as error:
            # Also when it broke off half-way: what arrived is dropped there with the request.
            raise InstanceLost("a preprocess instance is gone", instance_id=beat.instance_id, code=UNREACHABLE) from error
        try:
            answer = msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            answer = None
        if not isinstance(answer, dict):
            answer = {}
        if response.is_success:
            return answer
        raise _error(response.status_code, answer.get("error"))


def _error(status: int, body: Any) -> TriptychError:
    """What an upload was refused with: a WireError, or at least its status."""
    try:
        return from_wire(msgspec.convert(body, WireError))
    except msgspec.ValidationError:
        return Overloaded("a preprocess instance is busy") if status == 503 else InternalError()
