"""What every channel of the transport promises: one suite over shared memory, Gloo, and pulls from ourselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from support.loopback import LoopbackPlane
from support.transport import until
from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, Overloaded
from triptych.shared.messages import InstanceId, Message, PairRequest, PullDone, PullRequest, Reply, RequestId, TensorRef
from triptych.shared.transport.memory import INLINE_COPY_BYTES
from triptych.shared.transport.transport import InstanceTransport

CAPACITY_BYTES = 80 << 20
REQUEST = RequestId("request-1")
OWNER = InstanceId("owner-0-aa")
PULLER = InstanceId("puller-0-bb")


class Plane(LoopbackPlane):
    """Can delay replies, and remembers what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.silent = False
        self.loses_reply = False

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        self.sent.append(message)
        if self.silent:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("no answer in time")
        reply = await super().request(instance_id, message, timeout_s)
        if self.loses_reply and isinstance(message, PullRequest):
            raise InstanceLost("the message bus was restarted", code="bus_lost")
        return reply

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        self.sent.append(message)
        await super().publish(instance_id, message)


@dataclass
class Peers:
    plane: Plane
    owner: InstanceTransport
    puller: InstanceTransport

    @property
    def is_local(self) -> bool:
        return self.owner is self.puller

    async def pull(self, ref: TensorRef, timeout_s: float = 20.0, release: bool = True) -> torch.Tensor:
        return await self.puller.pull(ref, self.owner.address, timeout_s, release)

    async def settled(self, bytes_used: int = 0, num_leases: int = 0) -> None:
        """The store holds just this much, soon: PullDone is only published."""
        await until(lambda: self.owner.usage() == (bytes_used, CAPACITY_BYTES, num_leases))
        self.owner.check_integrity()


@pytest.fixture(params=["shared_memory", "gloo", "local"])
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    plane = Plane()
    mode = "auto" if request.param == "local" else request.param
    owner = InstanceTransport(OWNER, plane, "127.0.0.1", CAPACITY_BYTES, mode)
    await owner.start()
    plane.transports[OWNER] = owner
    puller = owner
    if request.param != "local":
        puller = InstanceTransport(PULLER, plane, "127.0.0.1", CAPACITY_BYTES, mode)
        await puller.start()
        plane.transports[PULLER] = puller
    yield Peers(plane, owner, puller)
    await puller.close()
    await owner.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randint(0, 255, (37, 41, 3), dtype=torch.uint8),
        torch.tensor([True, False, True]),
        torch.tensor([9], dtype=torch.uint8),
        torch.tensor(1.5, dtype=torch.float64),
        torch.zeros(0, 7, dtype=torch.bfloat16),
        torch.arange(24, dtype=torch.int64).reshape(4, 6).t(),
        torch.randn(100, 3001),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
async def test_bytes_survive(peers: Peers, tensor: torch.Tensor) -> None:
    ref = await peers.owner.put(tensor, REQUEST, 30.0)
    assert ref.num_bytes == tensor.numel() * tensor.element_size()
    pulled = await peers.pull(ref)
    assert pulled.dtype == tensor.dtype
    assert pulled.shape == tensor.shape
    assert torch.equal(pulled, tensor)
    await peers.settled()


async def test_64_mb_into_a_given_tensor(peers: Peers) -> None:
    tensor = torch.arange(16 << 20, dtype=torch.int32)
    out = torch.zeros_like(tensor)
    ref = await peers.owner.put(tensor, REQUEST, 30.0)
    pulled = await peers.puller.pull(ref, peers.owner.address, 30.0, out=out)
    assert pulled is out
    assert torch.equal(out, tensor)
    await peers.settled()


async def test_a_given_tensor_must_fit(peers: Peers) -> None:
    ref = await peers.owner.put(torch.zeros(4, 4), REQUEST, 30.0)
    for out in (torch.zeros(16), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 8)[:, ::2]):
        with pytest.raises(InternalError):
            await peers.puller.pull(ref, peers.owner.address, 20.0, out=out)
    await peers.pull(ref)


async def test_what_was_pulled_is_our_own(peers: Peers) -> None:
    ref = await peers.owner.put(torch.ones(1000), REQUEST, 30.0)
    first = await peers.pull(ref, release=False)
    first.zero_()
    assert torch.equal(await peers.pull(ref), torch.ones(1000))
    await peers.settled()


async def test_release_drops_and_no_release_keeps(peers: Peers) -> None:
    ref = await peers.owner.put(torch.ones(1000), REQUEST, 30.0)
    used_bytes, _, num_leases = peers.owner.usage()
    assert num_leases == 1
    await peers.pull(ref, release=False)
    await peers.settled(used_bytes, 1)
    await peers.pull(ref, release=True)
    await peers.settled()
    with pytest.raises(InstanceLost) as caught:
        await peers.pull(ref)
    assert caught.value.code == "tensor_gone"


async def test_released_tensors_are_a_typed_miss(peers: Peers) -> None:
    ref = await peers.owner.put(torch.ones(10), REQUEST, 30.0)
    others = await peers.owner.put(torch.zeros(10), RequestId("request-2"), 30.0)
    peers.owner.release_request(REQUEST)
    peers.owner.release_request(REQUEST)
    peers.owner.release(ref.tensor_id)
    with pytest.raises(InstanceLost) as caught:
        await peers.pull(ref)
    assert caught.value.code == "tensor_gone"
    assert torch.equal(await peers.pull(others), torch.zeros(10))
    await peers.settled()


@pytest.mark.parametrize(
    "lie",
    [
        {"num_bytes": 1 << 20},
        {"shape": (1 << 18,), "num_bytes": 1 << 20},
        {"shape": (100,), "num_bytes": 400},
        {"shape": (5, 2)},
        {"dtype": "int32"},
        {"dtype": "object"},
        {"shape": (-1, -10)},
    ],
)
async def test_a_lying_reference_is_refused(peers: Peers, lie: dict[str, object]) -> None:
    ref = await peers.owner.put(torch.ones(10), REQUEST, 30.0)
    with pytest.raises(InternalError) as caught:
        await peers.pull(msgspec.structs.replace(ref, **lie))
    assert caught.value.code == "tensor_mismatch"
    assert torch.equal(await peers.pull(ref), torch.ones(10))
    await peers.settled()


async def test_leases_expire_in_any_order(peers: Peers) -> None:
    long = await peers.owner.put(torch.ones(10), REQUEST, 60.0)
    await peers.owner.put(torch.ones(10), REQUEST, 0.2)
    longer = await peers.owner.put(torch.ones(10), REQUEST, 600.0)
    await peers.owner.put(torch.ones(10), REQUEST, 0.1)
    await until(lambda: peers.owner.usage()[2] == 2)
    for ref in (longer, long):
        assert torch.equal(await peers.pull(ref), torch.ones(10))
    await peers.settled()


class Lazy:
    """A lazy tensor's two callbacks, with what happened to them."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.num_released = 0
        self.may_write = threading.Event()
        self.may_write.set()

    def materialize(self, destination: torch.Tensor) -> None:
        self.threads.append(threading.get_ident())
        assert self.may_write.wait(10)
        destination.copy_(torch.arange(destination.numel()).reshape(destination.shape))

    def on_release(self) -> None:
        assert asyncio.get_running_loop()
        self.num_released += 1

    async def put(self, owner: InstanceTransport, lease_s: float = 30.0, size: int = 4096) -> TensorRef:
        return await owner.put_lazy((2, size), torch.int32, REQUEST, lease_s, self.materialize, self.on_release)


async def test_lazy_takes_room_only_while_pulled(peers: Peers) -> None:
    lazy = Lazy()
    ref = await lazy.put(peers.owner)
    await peers.settled(0, 1)
    assert lazy.threads == []
    for _ in range(2):
        pulled = await peers.pull(ref, release=False)
        assert torch.equal(pulled, torch.arange(8192, dtype=torch.int32).reshape(2, 4096))
        await peers.settled(0, 1)
    assert len(lazy.threads) == 2
    assert threading.get_ident() not in lazy.threads
    assert lazy.num_released == 0
    await peers.pull(ref)
    await peers.settled()
    assert lazy.num_released == 1


async def test_lazy_is_written_once_for_simultaneous_pulls(peers: Peers) -> None:
    lazy = Lazy()
    lazy.may_write.clear()
    ref = await lazy.put(peers.owner)
    pulls = [asyncio.create_task(peers.pull(ref, release=False)) for _ in range(2)]
    await until(lambda: len(lazy.threads) == 1)
    lazy.may_write.set()
    for pulled in await asyncio.gather(*pulls):
        assert int(pulled[1, -1]) == 8191
    peers.owner.release(ref.tensor_id)
    await peers.settled()
    assert lazy.num_released == 1


async def test_release_during_a_pull_frees_after_it(peers: Peers) -> None:
    lazy = Lazy()
    lazy.may_write.clear()
    ref = await lazy.put(peers.owner)
    pull = asyncio.create_task(peers.pull(ref))
    await until(lambda: len(lazy.threads) == 1)
    peers.owner.release_request(REQUEST)
    assert lazy.num_released == 0
    assert peers.owner.usage()[0] > 0
    lazy.may_write.set()
    assert int((await pull)[1, -1]) == 8191
    await peers.settled()
    assert lazy.num_released == 1


@pytest.mark.parametrize("end", ["release", "request", "expiry", "close"])
async def test_on_release_comes_once_whatever_the_end(peers: Peers, end: str) -> None:
    lazy = Lazy()
    ref = await lazy.put(peers.owner, lease_s=0.1 if end == "expiry" else 30.0)
    if end == "release":
        peers.owner.release(ref.tensor_id)
    elif end == "request":
        peers.owner.release_request(REQUEST)
    elif end == "close":
        await peers.owner.close()
    await until(lambda: lazy.num_released == 1)
    peers.owner.release(ref.tensor_id)
    peers.owner.release_request(REQUEST)
    assert lazy.num_released == 1
    assert peers.owner.usage()[2] == 0


async def test_a_kept_tensor_is_there_without_a_copy_and_copied_when_pulled(peers: Peers) -> None:
    lazy, tensor = Lazy(), torch.arange(INLINE_COPY_BYTES, dtype=torch.int32)
    ref = await peers.owner.put_kept(tensor, REQUEST, 30.0, lazy.on_release)
    assert peers.owner.get(ref) is tensor
    await peers.settled(0, 1)
    assert torch.equal(await peers.pull(ref, release=False), tensor)
    await peers.settled(0, 1)
    assert lazy.num_released == 0
    await peers.pull(ref)
    await peers.settled()
    assert lazy.num_released == 1
    with pytest.raises(InstanceLost):
        peers.owner.get(ref)


async def test_a_small_kept_tensor_is_copied_at_once(peers: Peers) -> None:
    lazy, tensor = Lazy(), torch.arange(8192, dtype=torch.int32)
    ref = await peers.owner.put_kept(tensor, REQUEST, 30.0, lazy.on_release)
    assert peers.owner.get(ref) is tensor
    assert ref.offset is not None
    used_bytes, *_ = peers.owner.usage()
    for release in (False, True):
        await peers.settled(used_bytes, 1)
        assert torch.equal(await peers.pull(ref, release=release), tensor)
    await peers.settled()
    assert lazy.num_released == 1


async def test_a_failing_materialize_fails_the_pull_only(peers: Peers) -> None:
    lazy = Lazy()

    def fail(destination: torch.Tensor) -> None:
        raise ValueError("no blocks")

    ref = await peers.owner.put_lazy((4,), torch.int32, REQUEST, 30.0, fail, lazy.on_release)
    with pytest.raises(InternalError):
        await peers.pull(ref)
    await peers.settled(0, 1)
    peers.owner.release(ref.tensor_id)
    await peers.settled()
    assert lazy.num_released == 1


async def test_simultaneous_pulls_of_one_pair(peers: Peers) -> None:
    tensors = [torch.full((50_000 + 1000 * index,), index, dtype=torch.int32) for index in range(24)]
    refs = [await peers.owner.put(tensor, REQUEST, 30.0) for tensor in tensors]
    pulled = await asyncio.gather(*(peers.pull(ref, timeout_s=15.0) for ref in refs))
    assert all(torch.equal(a, b) for a, b in zip(pulled, tensors, strict=True))
    await peers.settled()


async def test_a_full_store_refuses_then_takes_again(peers: Peers) -> None:
    quarter = torch.zeros(19 << 20, dtype=torch.uint8)
    refs = [await peers.owner.put(quarter, REQUEST, 30.0) for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        await peers.owner.put(quarter, REQUEST, 0.05)
    assert caught.value.code == "tensor_store_full"
    lazy = await Lazy().put(peers.owner, size=3 << 20)
    with pytest.raises(Overloaded):
        await peers.pull(lazy, timeout_s=0.3)
    waiting = asyncio.create_task(peers.owner.put(quarter, REQUEST, 30.0))
    await peers.pull(refs[0])
    ref = await asyncio.wait_for(waiting, 10.0)
    assert len(await peers.pull(ref)) == len(quarter)
    peers.owner.check_integrity()


async def test_larger_than_the_store_is_refused_at_once(peers: Peers) -> None:
    with pytest.raises(Overloaded) as caught:
        await asyncio.wait_for(peers.owner.put(torch.zeros(CAPACITY_BYTES, dtype=torch.uint8), REQUEST, 30.0), 4.0)
    assert caught.value.code == "tensor_too_large"


async def test_a_cancelled_pull_leaks_nothing(peers: Peers) -> None:
    lazy = Lazy()
    lazy.may_write.clear()
    ref = await lazy.put(peers.owner)
    pull = asyncio.create_task(peers.pull(ref))
    await until(lambda: len(lazy.threads) == 1)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    lazy.may_write.set()
    await until(lambda: peers.owner.usage()[0] == 0)
    peers.owner.release_request(REQUEST)
    await peers.settled()
    assert lazy.num_released == 1
    again = await peers.owner.put(torch.ones(3), REQUEST, 30.0)
    assert torch.equal(await peers.pull(again), torch.ones(3))


async def test_a_slow_owner_ends_in_deadline_exceeded(peers: Peers) -> None:
    lazy = Lazy()
    lazy.may_write.clear()
    ref = await lazy.put(peers.owner)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(peers.pull(ref, timeout_s=0.2), 8.0)
    lazy.may_write.set()
    await until(lambda: peers.owner.usage()[0] == 0)
    assert int((await peers.pull(ref))[1, -1]) == 8191
    await peers.settled()


async def test_a_pull_behind_slow_ones_times_out_alone(peers: Peers) -> None:
    ref = await peers.owner.put(torch.ones(10), REQUEST, 30.0)
    await peers.pull(ref, release=False)
    lazy = Lazy()
    lazy.may_write.clear()
    slow = [asyncio.create_task(peers.pull(await lazy.put(peers.owner), timeout_s=10.0)) for _ in range(2)]
    await until(lambda: len(lazy.threads) == 2)
    behind = await asyncio.gather(peers.pull(await lazy.put(peers.owner), timeout_s=0.2), return_exceptions=True)
    assert isinstance(behind[0], DeadlineExceeded)
    lazy.may_write.set()
    for pulled in await asyncio.gather(*slow):
        assert int(pulled[1, -1]) == 8191
    assert torch.equal(await peers.pull(ref), torch.ones(10))
    num_pairs = sum(isinstance(message, PairRequest) for message in peers.plane.sent)
    assert num_pairs <= 1, "a healthy pair was given up"
    peers.owner.release_request(REQUEST)
    await peers.settled()
    assert lazy.num_released == 3


async def test_puts_go_on_while_a_lazy_tensor_is_slow(peers: Peers) -> None:
    lazy = Lazy()
    lazy.may_write.clear()
    slow = [asyncio.create_task(peers.pull(await lazy.put(peers.owner), timeout_s=10.0)) for _ in range(2)]
    await until(lambda: len(lazy.threads) == 2)
    await asyncio.wait_for(peers.owner.put(torch.ones(1 << 20), REQUEST, 30.0), 8.0)
    lazy.may_write.set()
    await asyncio.gather(*slow)


async def test_a_transport_that_was_never_started_closes() -> None:
    await InstanceTransport(OWNER, Plane(), "127.0.0.1", CAPACITY_BYTES).close()


async def test_a_transfer_that_is_never_done_is_given_up(peers: Peers) -> None:
    """The puller vanishes after PullReply: its timeout, or forget_peer, ends the pin."""
    ref = await peers.owner.put(torch.ones(1000), REQUEST, 30.0)
    used_bytes = peers.owner.usage()[0]
    request = PullRequest(ref.tensor_id, PULLER, "shared_memory", 7, ref.shape, ref.dtype, ref.num_bytes, 60.0)
    await peers.owner.on_pull(request)
    await peers.owner.on_pull(msgspec.structs.replace(request, transfer_id=8, timeout_s=0.1))
    with pytest.raises(InternalError):
        await peers.owner.on_pull(request)
    peers.owner.release(ref.tensor_id)
    assert peers.owner.usage()[:2] == (used_bytes, CAPACITY_BYTES)
    with pytest.raises(InstanceLost):
        await peers.owner.on_pull(request)
    peers.owner.forget_peer(PULLER)
    await peers.settled()
    peers.owner.on_pull_done(PullDone(ref.tensor_id, PULLER, 7, True))  # late: nothing left to do


class TestLostOwner:
    @pytest.fixture
    def remote(self, peers: Peers) -> Peers:
        if peers.is_local:
            pytest.skip("we cannot lose ourselves")
        return peers

    async def ones(self, remote: Peers, size: int = 10) -> TensorRef:
        """What the owner must be asked for, whatever the channel."""
        return msgspec.structs.replace(await remote.owner.put(torch.ones(size), REQUEST, 30.0), offset=None)

    async def test_nobody_answers(self, remote: Peers) -> None:
        ref = await self.ones(remote)
        del remote.plane.transports[OWNER]
        with pytest.raises(InstanceLost):
            await asyncio.wait_for(remote.pull(ref), 4.0)

    async def test_no_answer_in_time(self, remote: Peers) -> None:
        ref = await self.ones(remote)
        remote.plane.silent = True
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(remote.pull(ref, timeout_s=0.2), 8.0)
        remote.plane.silent = False
        assert torch.equal(await remote.pull(ref), torch.ones(10))

    async def test_forgotten_during_a_pull(self, remote: Peers) -> None:
        ref = await self.ones(remote)
        remote.plane.silent = True
        pull = asyncio.create_task(remote.pull(ref, timeout_s=3.0))
        await until(lambda: bool(remote.plane.sent))
        remote.puller.forget_peer(OWNER)
        with pytest.raises(InstanceLost):
            await asyncio.wait_for(pull, 2.5)
        remote.plane.silent = False
        assert torch.equal(await remote.pull(ref), torch.ones(10))

    async def test_a_lost_reply_breaks_the_pair_that_may_be_sending(self, remote: Peers) -> None:
        refs = [await self.ones(remote, 1 << 20) for _ in range(2)]
        await remote.pull(refs[0], release=False)
        remote.plane.loses_reply = True
        with pytest.raises(InstanceLost):
            await remote.pull(refs[0])
        remote.plane.loses_reply = False
        for ref in refs:
            assert torch.equal(await remote.pull(ref), torch.ones(1 << 20))
        await remote.settled()
        epochs = [
            message.epoch for message in remote.plane.sent if isinstance(message, PullRequest) and message.channel == "gloo"
        ]
        assert not epochs or epochs[1] not in epochs[2:]

    async def test_channel_is_the_one_asked_for(self, remote: Peers, request: pytest.FixtureRequest) -> None:
        ref = await self.ones(remote)
        await remote.pull(ref)
        channels = [message.channel for message in remote.plane.sent if isinstance(message, PullRequest)]
        assert channels == [request.node.callspec.params["peers"]]

    async def test_what_lies_in_shared_memory_is_read_without_asking(
        self, remote: Peers, request: pytest.FixtureRequest
    ) -> None:
        ref = await remote.owner.put(torch.ones(10), REQUEST, 30.0)
        assert torch.equal(await remote.pull(ref), torch.ones(10))
        num_asked = sum(isinstance(message, PullRequest) for message in remote.plane.sent)
        assert num_asked == (request.node.callspec.params["peers"] != "shared_memory")
        await remote.settled()


@pytest.fixture
async def apart() -> AsyncIterator[Peers]:
    """Shared memory is prescribed, and the owner's cannot be opened from where the puller is."""
    plane = Plane()
    made = [InstanceTransport(name, plane, "127.0.0.1", CAPACITY_BYTES, "shared_memory") for name in (OWNER, PULLER)]
    for name, transport in zip((OWNER, PULLER), made, strict=True):
        await transport.start()
        plane.transports[name] = transport
    made[0].address = msgspec.structs.replace(made[0].address, arena_path="/proc/1/fd/99999")
    yield Peers(plane, *made)
    for transport in made:
        await transport.close()


async def test_unreachable_shared_memory_of_a_living_owner_is_our_fault(apart: Peers) -> None:
    ref = await apart.owner.put(torch.ones(10), REQUEST, 30.0)
    with pytest.raises(InternalError) as caught:
        await apart.pull(ref)
    assert caught.value.code == "transport_unusable"
    apart.owner.release(ref.tensor_id)
    await apart.settled()


async def test_unreachable_shared_memory_of_a_dead_owner_is_its_loss(apart: Peers) -> None:
    ref = await apart.owner.put(torch.ones(10), REQUEST, 30.0)
    del apart.plane.transports[OWNER]
    with pytest.raises(InstanceLost):
        await apart.pull(ref)
