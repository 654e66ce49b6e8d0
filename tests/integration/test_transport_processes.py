"""The transport between two real processes: tensors of all kinds, and what is left when either side dies or stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from support.transport import CHILD, REQUEST, Order, pattern, until
from support.transport_processes import CAPACITY_BYTES, PeerTemplate, Processes, peer_template, two_processes
from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, Overloaded
from triptych.shared.messages import TensorRef


@pytest.fixture(scope="module")
def template() -> Iterator[PeerTemplate]:
    with peer_template() as made:
        yield made


@pytest_asyncio.fixture(params=["shared_memory", "gloo"], scope="module", loop_scope="module")
async def processes(template: PeerTemplate, request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    async with two_processes(template, request.param) as both:
        yield both


@pytest.fixture
async def make(template: PeerTemplate) -> AsyncIterator[Callable[..., Awaitable[Processes]]]:
    async with AsyncExitStack() as stack:
        yield lambda *args: stack.enter_async_context(two_processes(template, *args))


async def quickly(awaitable: Awaitable[Any], within_s: float = 8.0) -> Any:
    """Sooner than the timeouts of 10 s and more."""
    return await asyncio.wait_for(awaitable, within_s)


@pytest.mark.asyncio(loop_scope="module")
async def test_tensors_cross(processes: Processes) -> None:
    for num_bytes, dtype in (
        (1, "uint8"),
        (0, "float32"),
        (6_002, "bfloat16"),
        (40_000, "int64"),
        (9_000_001, "uint8"),
        (64 << 20, "float32"),
    ):
        await processes.check(num_bytes, dtype)
    for num_bytes in (1, 0, 100_000):
        ref = await processes.transport.put(pattern(num_bytes, "uint8"), REQUEST, 60.0)
        done = await processes.plane.order(Order("pull", ref, processes.transport.address))
        assert done.numbers == (1,)
    await processes.child_is_empty()
    await until(lambda: processes.transport.usage() == (0, CAPACITY_BYTES, 0))


@pytest.mark.asyncio(loop_scope="module")
async def test_simultaneous_pulls_both_ways(processes: Processes) -> None:
    transport = processes.transport

    async def push(num_bytes: int) -> None:
        ref = await transport.put(pattern(num_bytes, "uint8"), REQUEST, 60.0)
        assert (await processes.plane.order(Order("pull", ref, transport.address))).numbers == (1,)

    await asyncio.gather(*(processes.check(70_000 + 999 * i) for i in range(12)), *(push(50_000 + i) for i in range(12)))
    await processes.child_is_empty()
    await until(lambda: transport.usage() == (0, CAPACITY_BYTES, 0))
    transport.check_integrity()


@pytest.mark.asyncio(loop_scope="module")
async def test_few_threads(processes: Processes) -> None:
    for _ in range(3):
        await processes.check(1 << 20)
    num_threads = (await processes.plane.order(Order("usage"))).numbers[3]
    assert num_threads <= 16, f"{num_threads} threads in a process with one pair"


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_listens_on_all_interfaces(processes: Processes) -> None:
    await processes.check()
    for pid in (os.getpid(), processes.child.pid):
        hosts = listening_hosts(pid)
        assert hosts, "the TCPStore listens"
        assert hosts <= {"127.0.0.1"}


@pytest.mark.asyncio(loop_scope="module")
async def test_stale_and_lying_references(processes: Processes) -> None:
    ref, address = await processes.put(1000)
    for lie in ({"num_bytes": 64 << 20, "shape": (64 << 20,)}, {"num_bytes": 10, "shape": (10,)}, {"num_bytes": 2000}):
        with pytest.raises(InternalError) as refused:
            await processes.transport.pull(msgspec.structs.replace(ref, **lie), address, 5.0)
        assert refused.value.code == "tensor_mismatch"
    await processes.transport.pull(ref, address, 5.0)
    await processes.child_is_empty()
    with pytest.raises(InstanceLost) as missed:
        await quickly(processes.transport.pull(ref, address, 5.0))
    assert missed.value.code == "tensor_gone"
    await processes.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_full_store_refuses_then_takes_again(processes: Processes) -> None:
    ref, address = await processes.put(70 << 20)
    with pytest.raises(Overloaded):
        await processes.put(20 << 20)
    await processes.transport.pull(ref, address, 15.0)
    await processes.check(20 << 20)


@pytest.mark.parametrize("mode", ["shared_memory", "gloo"])
async def test_owner_killed_before_it_answers(make: Callable[..., Awaitable[Processes]], mode: str) -> None:
    processes = await make(mode)
    await processes.check()
    ref, address = await processes.put(4, do="lazy_kill")
    with pytest.raises(InstanceLost):
        await quickly(processes.transport.pull(ref, address, 10.0))


async def test_owner_killed_while_we_receive(make: Callable[..., Awaitable[Processes]]) -> None:
    processes = await make("gloo")
    await processes.check()
    ref, address = await processes.put(1 << 20)
    await processes.plane.order(Order("stall"))
    pull = asyncio.create_task(processes.transport.pull(ref, address, 10.0))
    await until(is_receiving)
    processes.kill()
    with pytest.raises(InstanceLost):
        await quickly(pull)


async def test_owner_forgotten_while_we_receive(make: Callable[..., Awaitable[Processes]]) -> None:
    processes = await make("gloo", 4.0)
    await processes.check()
    ref, address = await processes.put(1 << 20)
    await processes.plane.order(Order("stall"))
    pull = asyncio.create_task(processes.transport.pull(ref, address, 10.0))
    await until(is_receiving)
    processes.transport.forget_peer(CHILD)
    with pytest.raises(InstanceLost):
        await quickly(pull, 3.0)
    await processes.plane.order(Order("stall", on=False))
    await processes.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_stopped_owner_ends_in_time_and_works_again(processes: Processes) -> None:
    await processes.check()
    ref, address = await processes.put(1000)
    ref = to_be_asked_for(ref)
    processes.kill(signal.SIGSTOP)
    begin_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await quickly(processes.transport.pull(ref, address, 0.5))
    assert time.monotonic() - begin_s >= 0.5
    processes.kill(signal.SIGCONT)
    assert torch.equal(await processes.transport.pull(ref, address, 10.0), pattern(1000, "uint8"))
    await processes.child_is_empty()


async def test_owner_stopped_while_we_receive(make: Callable[..., Awaitable[Processes]]) -> None:
    processes = await make("gloo")
    await processes.check()
    epoch = processes.transport._owners._pairs[CHILD].epoch
    ref, address = await processes.put(1 << 20)
    await processes.plane.order(Order("stall"))
    pull = asyncio.create_task(processes.transport.pull(ref, address, 1.0))
    await until(is_receiving)
    processes.kill(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        await quickly(pull)
    processes.kill(signal.SIGCONT)
    await processes.plane.order(Order("stall", on=False))
    await processes.check(1 << 20)
    assert processes.transport._owners._pairs[CHILD].epoch > epoch
    await processes.transport.pull(ref, address, 10.0)
    await processes.child_is_empty()


async def test_owner_stopped_before_the_pair_forms(make: Callable[..., Awaitable[Processes]]) -> None:
    """A TCPStore client of a stopped process can hang beyond its timeout: the pull must not."""
    processes = await make("gloo")
    ref, address = await processes.put(1000)
    request = processes.plane.request

    async def stop_after(*args: Any) -> Any:
        reply = await request(*args)
        processes.kill(signal.SIGSTOP)
        return reply

    processes.plane.request = stop_after  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        await quickly(processes.transport.pull(ref, address, 0.7))
    processes.plane.request = request  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        await quickly(processes.transport.pull(ref, address, 0.3))
    processes.kill(signal.SIGCONT)
    assert torch.equal(await processes.transport.pull(ref, address, 10.0), pattern(1000, "uint8"))


@pytest.mark.parametrize("end", ["forget_peer", "timeout"])
@pytest.mark.parametrize("mode", ["shared_memory", "gloo"])
async def test_puller_killed_while_it_pulls(make: Callable[..., Awaitable[Processes]], mode: str, end: str) -> None:
    processes = await make(mode, 3.0 if end == "timeout" else 15.0)
    transport = processes.transport
    ref = await transport.put(torch.zeros(8 << 20, dtype=torch.uint8), REQUEST, 60.0)
    processes.after_pull = processes.kill
    with pytest.raises(InstanceLost):
        await processes.plane.order(Order("pull", to_be_asked_for(ref), transport.address))
    transport.release_request(REQUEST)
    assert transport.usage()[0] > 0, "released, but a pull is under way"
    if end == "forget_peer":
        transport.forget_peer(CHILD)
    await quickly(until(lambda: transport.usage() == (0, CAPACITY_BYTES, 0)))
    transport.check_integrity()


def to_be_asked_for(ref: TensorRef) -> TensorRef:
    """Else it would be read from shared memory without a word."""
    return msgspec.structs.replace(ref, offset=None)


def is_receiving() -> bool:
    """A thread of ours waits in a Gloo receive."""
    frames = sys._current_frames().values()
    return any(frame.f_code.co_name == "_wait_for_all" for frame in frames)


def listening_hosts(pid: int) -> set[str]:
    """Addresses that the process listens on, by the inodes of its sockets."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(path.readlink()))
    inodes = {link[8:-1] for link in links if re.fullmatch(r"socket:\[\d+\]", link)}
    hosts = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                words = bytes.fromhex(local.split(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                hosts.add(socket.inet_ntop(family, raw))
    return hosts
