"""The wire form of messages: MessagePack by msgspec, at most MAX_PAYLOAD_BYTES. Nothing else encodes or decodes one.

Beside an upload's bytes a request travels as the HTTP header REQUEST_HEADER, in base64.
"""

from __future__ import annotations

import base64

import msgspec

from triptych.shared.errors import InternalError, TriptychError
from triptych.shared.messages import ErrorReply, Event, InstanceRequest, Message, Reply

MAX_PAYLOAD_BYTES = 64 * 1024  # chosen: the bound; NATS itself stops at 1 MB
REQUEST_HEADER = "x-triptych-request"

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[InstanceRequest] = msgspec.msgpack.Decoder(InstanceRequest)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Message) -> bytes:
    """The wire form of `message`. Raises InternalError when it is larger than MAX_PAYLOAD_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InternalError(f"a {type(message).__name__} of {len(payload)} bytes is over the bus limit")
    return payload


def decode_request(payload: bytes) -> InstanceRequest:
    """Raises msgspec.MsgspecError when the payload is not a valid request."""
    return _request_decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """Raises msgspec.MsgspecError when the payload is not a valid reply."""
    return _reply_decoder.decode(payload)


def decode_event(payload: bytes) -> Event:
    """Raises msgspec.MsgspecError when the payload is not a valid event."""
    return _event_decoder.decode(payload)


def header_of(message: Message) -> str:
    """`message` as the value of REQUEST_HEADER. Raises as `encode` does."""
    return base64.b64encode(encode(message)).decode()


def request_of_header(value: str) -> InstanceRequest:
    """Raises msgspec.MsgspecError when the value is not a valid request."""
    try:
        payload = base64.b64decode(value, validate=True)
    except ValueError as error:
        raise msgspec.DecodeError("not base64") from error
    return decode_request(payload)


def error_reply(error: TriptychError) -> ErrorReply:
    """What a handler answers with instead of its reply."""
    return ErrorReply(error.to_wire())
