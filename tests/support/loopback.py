"""A `ControlPlane` between transports of one process, without a bus, and what a host does with its messages.

Messages go through their wire form, and are handled as tasks of their own, as on the bus.
"""

from __future__ import annotations

import asyncio

from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, TriptychError, from_wire
from triptych.shared.messages import ErrorReply, InstanceId, Message, PairRequest, PullDone, PullRequest, Reply
from triptych.shared.transport.api import Transport
from triptych.shared.wire import decode_reply, decode_request, encode, error_reply


async def handle(transport: Transport, payload: bytes) -> Message | None:
    """What an instance's host does with a control message of the transport: the reply, or None when there is none."""
    try:
        match decode_request(payload):
            case PullRequest() as message:
                return await transport.on_pull(message)
            case PairRequest() as message:
                return await transport.on_pair(message)
            case PullDone() as message:
                transport.on_pull_done(message)
                return None
            case _:
                raise InternalError("not a message of the transport")
    except TriptychError as error:
        return error_reply(error)


class LoopbackPlane:
    """Add each transport under its instance's id; remove one to make it lost."""

    def __init__(self) -> None:
        self.transports: dict[InstanceId, Transport] = {}
        self._handlers: set[asyncio.Task[Message | None]] = set()

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        handler = self._handle(instance_id, message)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.shield(handler)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        reply = decode_reply(encode(answer)) if answer is not None else None
        if reply is None or isinstance(reply, ErrorReply):
            raise from_wire(reply.error) if reply is not None else InternalError("no reply")
        return reply

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        if instance_id in self.transports:
            self._handle(instance_id, message)

    def _handle(self, instance_id: InstanceId, message: Message) -> asyncio.Task[Message | None]:
        transport = self.transports.get(instance_id)
        if transport is None:
            raise InstanceLost("nobody answers there", instance_id=instance_id)
        handler = asyncio.create_task(handle(transport, encode(message)))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        return handler
