"""The wire is plain MessagePack: the reference `msgpack` package reads every message, and what it writes we read back."""

from __future__ import annotations

from typing import Any, get_args

import msgpack
import msgspec
import pytest
from msgspec import inspect

from triptych.shared import messages, wire
from triptych.shared.errors import InternalError, WireError

REQUESTS = get_args(messages.InstanceRequest)
REPLIES = get_args(messages.Reply)
EVENTS = get_args(messages.Event)
EVERY = [
    *((kind, wire.decode_request) for kind in REQUESTS),
    *((kind, wire.decode_reply) for kind in REPLIES),
    *((kind, wire.decode_event) for kind in EVENTS),
]


def _sample(kind: inspect.Type, is_full: bool) -> Any:
    """A value of a type: with everything set, or with as little as the type allows."""
    match kind:
        case inspect.StructType():
            fields = [field for field in kind.fields if is_full or field.required]
            return kind.cls(**{field.name: _sample(field.type, is_full) for field in fields})
        case inspect.UnionType():
            chosen = [option for option in kind.types if not isinstance(option, inspect.NoneType)]
            return _sample(chosen[0], is_full) if is_full else None
        case inspect.VarTupleType():
            return (_sample(kind.item_type, is_full),) * (2 if is_full else 0)
        case inspect.DictType():
            return {_sample(kind.key_type, True): _sample(kind.value_type, True)} if is_full else {}
        case inspect.TupleType():
            return tuple(_sample(item, is_full) for item in kind.item_types)
        case inspect.LiteralType():
            return kind.values[-1]
    samples: dict[type[inspect.Type], Any] = {
        inspect.StrType: "naïve-\u56fe" if is_full else "",
        inspect.BytesType: b"\x00\xff" * 16 if is_full else b"",
        inspect.IntType: 2**40 if is_full else 0,
        inspect.FloatType: 0.1,
        inspect.BoolType: is_full,
    }
    return samples[type(kind)]


def _message(kind: type[messages.Message], is_full: bool) -> messages.Message:
    made = _sample(inspect.type_info(kind), is_full)
    assert isinstance(made, kind)
    return made


def test_every_message_is_reachable() -> None:
    """A message that no decoder takes could be sent and never read."""
    defined = {
        value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, messages.Message)
    } - {messages.Message}
    assert defined == {*REQUESTS, *REPLIES, *EVENTS}


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "least"])
@pytest.mark.parametrize(("kind", "decode"), EVERY, ids=lambda value: getattr(value, "__name__", ""))
def test_reference_msgpack_reads_and_writes_it(kind: type[messages.Message], decode: Any, is_full: bool) -> None:
    message = _message(kind, is_full)
    payload = wire.encode(message)
    fields = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    assert fields["type"] == kind.__name__
    assert set(fields) - {"type"} <= set(kind.__struct_fields__)
    assert decode(payload) == message
    assert decode(msgpack.packb(fields, use_bin_type=True)) == message


@pytest.mark.parametrize(("kind", "decode"), EVERY, ids=lambda value: getattr(value, "__name__", ""))
def test_a_newer_peer_may_add_a_field(kind: type[messages.Message], decode: Any) -> None:
    message = _message(kind, True)
    fields = msgpack.unpackb(wire.encode(message), raw=False)
    assert decode(msgpack.packb({**fields, "added_later": [1, 2]})) == message


def test_wrong_types_are_refused() -> None:
    payload = msgpack.packb({"type": "ReleaseRequest", "request_id": 7})
    with pytest.raises(msgspec.ValidationError):
        wire.decode_request(payload)
    with pytest.raises(msgspec.ValidationError):
        wire.decode_request(msgpack.packb({"type": "NoSuchRequest"}))
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_request(b"\xc1")


def test_too_large_a_message_is_not_sent() -> None:
    error = WireError("internal", "internal", "x" * wire.MAX_PAYLOAD_BYTES, 500)
    with pytest.raises(InternalError, match="over the bus limit"):
        wire.encode(messages.ErrorReply(error))
