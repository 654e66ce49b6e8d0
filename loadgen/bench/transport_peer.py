"""The other process of bench transport: owns the tensors that are pulled. `python -m triptych.loadgen.bench.transport_peer
MODE CAPACITY_BYTES` obeys orders on stdin, length-prefixed MessagePack, and answers each on stdout.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import msgspec
import torch

from triptych.shared.errors import InternalError, TriptychError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import InstanceId, Message, PairRequest, PullDone, PullRequest, Reply, RequestId, TensorRef
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_request, encode, error_reply

PEER = InstanceId("peer-0-bench")
LEASE_S = 120.0  # chosen: longer than any round
SEND_TIMEOUT_S = 20.0  # chosen


class Control(msgspec.Struct, frozen=True, tag=True):
    """A message of the transport, as the bus would bring it. The answer is the reply, empty for none."""

    payload: bytes


class Put(msgspec.Struct, frozen=True, tag=True):
    """Lease a new tensor. The answer is a `Held`."""

    num_bytes: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send that many bytes to a port on loopback, over a plain socket. Answered at once."""

    num_bytes: int
    port: int


class Held(msgspec.Struct, frozen=True):
    ref: TensorRef
    address: TransportAddress


Order = Control | Put | Send


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError when the other side is gone."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(len(payload).to_bytes(4, "little") + payload)


class NoPeers:
    """Implements ControlPlane for the one that is only pulled from."""

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        raise InternalError("the owner of the tensors has nothing to ask")

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        raise InternalError("the owner of the tensors has nothing to tell")


async def _handle(transport: InstanceTransport, payload: bytes) -> bytes:
    try:
        match decode_request(payload):
            case PullRequest() as message:
                return encode(await transport.on_pull(message))
            case PairRequest() as message:
                return encode(await transport.on_pair(message))
            case PullDone() as message:
                transport.on_pull_done(message)
                return b""
            case _:
                raise InternalError("not a message of the transport")
    except TriptychError as error:
        return encode(error_reply(error))


async def _obey(transport: InstanceTransport, order: Order) -> bytes:
    match order:
        case Control():
            return await _handle(transport, order.payload)
        case Put():
            tensor = torch.ones(order.num_bytes, dtype=torch.uint8)
            ref = await transport.put(tensor, RequestId("bench"), LEASE_S)
            return msgspec.msgpack.encode(Held(ref, transport.address))
        case Send():
            await asyncio.to_thread(_send, order.num_bytes, order.port)
            return b""


def _send(num_bytes: int, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=SEND_TIMEOUT_S) as connection:
        connection.sendall(b"\1" * num_bytes)  # not zeros: untouched memory of zeros is one page, and always in the cache


async def main(mode: Any, capacity_bytes: int) -> None:
    """Until stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    pipe, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sys.stdout)
    writer = asyncio.StreamWriter(pipe, protocol, None, loop)
    transport = InstanceTransport(PEER, NoPeers(), "127.0.0.1", capacity_bytes, mode)
    await transport.start()
    try:
        while True:
            order: Order = msgspec.msgpack.decode(await read_frame(reader), type=Order)
            write_frame(writer, await _obey(transport, order))
    except asyncio.IncompleteReadError:
        await transport.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
