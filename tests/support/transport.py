"""A control plane over a socket, for transports of two processes without a bus, and the orders that a test gives the other.

Frames are length-prefixed MessagePack. Run as a module, this is the template that the other process is forked from (see
transport_processes.py), which serves the transport's control messages and the orders.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import torch

from support.loopback import handle
from triptych.services.launcher.fork_template import serve_forks
from triptych.shared.errors import DeadlineExceeded, InstanceLost, TriptychError, WireError, from_wire
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import ErrorReply, InstanceId, Message, Reply, RequestId, TensorRef
from triptych.shared.transport.layout import DTYPES, shaped
from triptych.shared.transport.transport import InstanceTransport
from triptych.shared.wire import decode_reply, encode

PARENT = InstanceId("parent-0-aa")
CHILD = InstanceId("child-0-bb")
REQUEST = RequestId("request-1")


class Order(msgspec.Struct, frozen=True):
    """do: put, stall (answer pulls without sending), lazy_kill (a tensor whose materialize kills the process), pull
    or usage."""

    do: str
    ref: TensorRef | None = None
    address: TransportAddress | None = None
    dtype: str = "uint8"
    num_bytes: int = 0
    timeout_s: float = 10.0
    on: bool = True


class Done(msgspec.Struct, frozen=True):
    ref: TensorRef | None = None
    address: TransportAddress | None = None
    error: WireError | None = None
    numbers: tuple[int, ...] = ()


class Frame(msgspec.Struct, frozen=True):
    """kind: control, publish, order, or answer (to the frame with the same seq of the other side)."""

    kind: str
    seq: int
    payload: bytes


Handler = Callable[[Frame], Awaitable[bytes | None]]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition that nothing signals."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def pattern(num_bytes: int, dtype: str) -> torch.Tensor:
    """Bytes that both sides can make, as 1-D dtype (compare as bytes: some are NaN)."""
    period = torch.arange(251, dtype=torch.uint8)  # prime: a shifted or torn block differs
    numbers = period.repeat(-(-num_bytes // 251))[:num_bytes].contiguous()
    return shaped(numbers, (num_bytes // DTYPES[dtype].itemsize,), DTYPES[dtype])


class SocketPlane:
    """`ControlPlane` to the one process at the other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._seq = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_lost = False

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        reply = decode_reply(await self.ask("control", encode(message), timeout_s))
        if isinstance(reply, ErrorReply):
            raise from_wire(reply.error)
        return reply

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        await self._send(Frame("publish", next(self._seq), encode(message)))

    async def order(self, order: Order, timeout_s: float = 20.0) -> Done:
        done = msgspec.msgpack.decode(await self.ask("order", msgspec.msgpack.encode(order), timeout_s), type=Done)
        if done.error is not None:
            raise from_wire(done.error)
        return done

    async def ask(self, kind: str, payload: bytes, timeout_s: float) -> bytes:
        if self.is_lost:
            raise InstanceLost("the socket is closed")
        seq = next(self._seq)
        future = self._waiting[seq] = asyncio.get_running_loop().create_future()
        await self._send(Frame(kind, seq, payload))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        finally:
            del self._waiting[seq]

    async def run(self) -> None:
        """Serve until the other side is gone."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                frame = msgspec.msgpack.decode(await self._reader.readexactly(size), type=Frame)
                if frame.kind == "answer":
                    if frame.seq in self._waiting and not self._waiting[frame.seq].done():
                        self._waiting[frame.seq].set_result(frame.payload)
                    continue
                task = asyncio.create_task(self._answer(frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_lost = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(InstanceLost("the socket is closed"))

    async def _answer(self, frame: Frame) -> None:
        answer = await self._handler(frame)
        if answer is not None and frame.kind != "publish":
            await self._send(Frame("answer", frame.seq, answer))

    async def _send(self, frame: Frame) -> None:
        payload = msgspec.msgpack.encode(frame)
        try:
            self._writer.write(len(payload).to_bytes(4, "little") + payload)
        except (ConnectionError, RuntimeError):
            self.is_lost = True


class Peer:
    """The other process's transport, obeying orders."""

    def __init__(self, mode: Any, timeout_s: float) -> None:
        self._mode = mode
        self._timeout_s = timeout_s

    async def main(self, channel: socket.socket) -> None:
        plane = SocketPlane(*await asyncio.open_connection(sock=channel), self._handle)
        self._transport = InstanceTransport(CHILD, plane, "127.0.0.1", 80 << 20, self._mode, self._timeout_s)
        await self._transport.start()
        await plane.run()

    async def _handle(self, frame: Frame) -> bytes | None:
        if frame.kind != "order":
            reply = await handle(self._transport, frame.payload)
            return encode(reply) if reply is not None else None
        try:
            done = await self._obey(msgspec.msgpack.decode(frame.payload, type=Order))
        except TriptychError as error:
            done = Done(error=error.to_wire())
        return msgspec.msgpack.encode(done)

    async def _obey(self, order: Order) -> Done:
        transport = self._transport
        if order.do == "put":
            return Done(await transport.put(pattern(order.num_bytes, order.dtype), REQUEST, 60.0), transport.address)
        if order.do == "lazy_kill":
            ref = await transport.put_lazy((4,), torch.uint8, REQUEST, 60.0, lambda _: os.kill(os.getpid(), 9), lambda: None)
            return Done(ref, transport.address)
        if order.do == "stall":
            self._stall(order.on)
            return Done()
        if order.do == "usage":
            transport.check_integrity()
            return Done(numbers=(*transport.usage(), len(os.listdir("/proc/self/task"))))
        assert order.do == "pull"
        assert order.ref is not None
        assert order.address is not None
        tensor = await transport.pull(order.ref, order.address, order.timeout_s)
        expected = pattern(order.ref.num_bytes, order.ref.dtype)
        return Done(numbers=(int(torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))),))

    def _stall(self, on: bool) -> None:
        """Answer PullRequest without posting the send: the puller then waits in its receive."""
        pullers = self._transport._pullers
        if on:

            async def no_send(*_: object) -> None:
                return None

            pullers.send = no_send  # type: ignore[method-assign]
        else:
            del pullers.send


def main() -> None:
    """Entry point of the template, and then of each fork: its output is the socket."""
    errors = os.dup(sys.stderr.fileno())
    fork = serve_forks(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if fork is not None:
        channel = socket.socket(fileno=os.dup(sys.stdout.fileno()))
        for stream in (sys.stdout, sys.stderr):
            os.dup2(errors, stream.fileno())
        mode, timeout_s = fork.arguments
        torch.set_num_threads(1)
        asyncio.run(Peer(mode, float(timeout_s)).main(channel))


if __name__ == "__main__":
    main()
