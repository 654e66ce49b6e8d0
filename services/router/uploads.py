"""Bytes that must not ride on the bus, sent by HTTP to a preprocess instance: media of data: URLs, and very long prompts."""

from __future__ import annotations

import io
from collections.abc import Mapping

import aiohttp
import msgspec

from triptych.shared.errors import (
    UNREACHABLE,
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    Overloaded,
    TriptychError,
    from_wire,
)
from triptych.shared.messages import (
    ErrorReply,
    Heartbeat,
    InstanceId,
    PreprocessReply,
    PreprocessRequest,
    RequestId,
    TensorRef,
)
from triptych.shared.wire import REQUEST_HEADER, decode_reply, header_of

MAX_CONNECTIONS = 256  # chosen: uploads at once; one more waits for its turn
CONNECT_TIMEOUT_S = 2.0  # chosen: same host or same network
KEEP_ALIVE_S = 20.0  # chosen: less than the servers keep idle connections, so that they never close one in use


class Uploader:
    """One pool of connections. Use it on one event loop and `close` it."""

    def __init__(self, router_id: InstanceId) -> None:
        self._router_id = router_id
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def picture(self, beat: Heartbeat, request: PreprocessRequest, content: bytes) -> PreprocessReply:
        """Have an encoded picture preprocessed at `beat`'s instance.

        Raises:
            InstanceLost: nobody answers there (code unreachable), or no longer.
            TriptychError: what it answered.
        """
        headers = {REQUEST_HEADER: header_of(request)}
        reply = decode_reply(await self._post(beat, "/media", headers, content, request.timeout_s))
        if not isinstance(reply, PreprocessReply):
            raise InternalError("a preprocess instance answered an upload with something else")
        return reply

    async def blob(self, beat: Heartbeat, request_id: RequestId, content: bytes, timeout_s: float) -> TensorRef:
        """Leave bytes at `beat`'s instance as a uint8 tensor. Raises as `picture` does."""
        headers = {"x-request-id": request_id, "x-router-id": self._router_id}
        answer = await self._post(beat, "/blobs", headers, content, timeout_s)
        return msgspec.msgpack.decode(answer, type=TensorRef)

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, beat: Heartbeat, path: str, headers: Mapping[str, str], content: bytes, timeout_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        sending = self._http.post(
            beat.http_url + path, data=io.BytesIO(content), headers=headers, timeout=timeout, allow_redirects=False
        )
        try:
            async with sending as response:
                answer = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise InstanceLost("a preprocess instance is gone", instance_id=beat.instance_id, code=UNREACHABLE) from error
        except TimeoutError:
            raise DeadlineExceeded() from None
        except aiohttp.ClientError as error:  # half-way: it may be what we sent that ended it
            raise InstanceLost("a preprocess instance was lost", instance_id=beat.instance_id) from error
        if response.ok:
            return answer
        raise _error(response.status, answer)


def _error(status: int, answer: bytes) -> TriptychError:
    """What an upload was refused with: an ErrorReply, or at least its status."""
    try:
        reply = decode_reply(answer)
    except msgspec.MsgspecError:
        reply = None
    if isinstance(reply, ErrorReply):
        return from_wire(reply.error)
    return Overloaded("a preprocess instance is busy") if status == 503 else InternalError()
