"""Pulls of stand-ins: their time by bytes and link, contention, room in the store, owners that are gone or hold nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from support.loopback import LoopbackPlane
from triptych.shared.cost_model.unknowns import LinkCosts
from triptych.shared.errors import DeadlineExceeded, InstanceLost, InternalError, Overloaded
from triptych.shared.messages import InstanceId, PullRequest, RequestId, TensorId, TensorRef
from triptych.shared.transport import store as store_module
from triptych.shared.transport.emulated import EmulatedTransport, Lane
from triptych.shared.transport.stand_in import UINT8, stand_in

REQUEST = RequestId("request-1")
CAPACITY_BYTES = 10 << 20
LINK = LinkCosts(latency_s=0.002, bytes_per_s=10e6)


@dataclass
class Peers:
    plane: LoopbackPlane
    owner: EmulatedTransport
    pullers: list[EmulatedTransport]

    async def pull(self, ref: TensorRef, puller: int = 0, timeout_s: float = 10.0, release: bool = True) -> float:
        """Seconds that it took."""
        begun_s = time.monotonic()
        pulled = await self.pullers[puller].pull(ref, self.owner.address, timeout_s, release)
        assert tuple(pulled.shape) == ref.shape
        return time.monotonic() - begun_s


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    plane = LoopbackPlane()
    made = []
    for name in ("owner-0-aa", "puller-0-bb", "puller-1-cc"):
        transport = EmulatedTransport(InstanceId(name), plane, CAPACITY_BYTES, LINK, 1.0, 5.0)
        await transport.start()
        plane.transports[InstanceId(name)] = transport
        made.append(transport)
    yield Peers(plane, made[0], made[1:])
    for transport in made:
        await transport.close()


async def settled(transport: EmulatedTransport, num_leases: int = 0) -> None:
    async with asyncio.timeout(5):
        while transport.usage()[2] != num_leases:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    transport.check_integrity()


def test_a_lane_is_one_after_the_other() -> None:
    lane = Lane(LinkCosts(0.5, 100.0), time_scale=2.0)
    assert lane.reserve(100, now_s=10.0) == pytest.approx(10.5 + 0.25)
    assert lane.reserve(100, now_s=10.0) == pytest.approx(11.0 + 0.25)
    assert lane.reserve(0, now_s=20.0) == pytest.approx(20.25)


async def test_a_pull_takes_as_long_as_its_bytes(peers: Peers) -> None:
    ref = await peers.owner.put(stand_in((1000, 1000)), REQUEST, 30.0)
    assert (ref.num_bytes, ref.dtype) == (1_000_000, "uint8")
    assert 0.1 <= await peers.pull(ref) < 1.0
    await settled(peers.owner)
    with pytest.raises(InstanceLost) as caught:
        await peers.pull(ref)
    assert caught.value.code == "tensor_gone"


async def test_pulls_share_the_owners_link_and_the_pullers(peers: Peers) -> None:
    refs = [await peers.owner.put(stand_in((1000, 500)), REQUEST, 30.0) for _ in range(4)]
    times_s = await asyncio.gather(*(peers.pull(ref, i % 2) for i, ref in enumerate(refs)))
    assert max(times_s) >= 0.2, "four of 0.05 s from one owner"
    backs = [await peer.put(stand_in((1000, 500)), REQUEST, 30.0) for peer in peers.pullers]
    begun_s = time.monotonic()
    await asyncio.gather(*(peers.owner.pull(ref, peers.owner.address, 10.0) for ref in backs))
    assert time.monotonic() - begun_s >= 0.1, "two of 0.05 s to one puller"


async def test_lazy_tensors_take_room_only_while_they_are_pulled(peers: Peers) -> None:
    calls: list[str] = []

    ref = await peers.owner.put_lazy(
        (64, 1000), UINT8, REQUEST, 30.0, lambda out: calls.append("written"), lambda: calls.append("ended")
    )
    assert peers.owner.usage() == (0, CAPACITY_BYTES, 1)
    await peers.pull(ref, release=False)
    assert calls == ["written"]
    peers.owner.release_request(REQUEST)
    await settled(peers.owner)
    assert calls == ["written", "ended"]
    assert peers.owner.usage()[0] == 0


async def test_a_full_store_refuses(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PUT_WAIT_S", 0.05)
    await peers.owner.put_bytes(b"", (9 << 20,), REQUEST, 30.0)
    with pytest.raises(Overloaded) as caught:
        await peers.owner.put(stand_in((2 << 20,)), REQUEST, 30.0)
    assert caught.value.code == "tensor_store_full"


async def test_time_runs_out(peers: Peers) -> None:
    ref = await peers.owner.put(stand_in((1000, 5000)), REQUEST, 30.0)
    with pytest.raises(DeadlineExceeded):
        await peers.pull(ref, timeout_s=0.1)
    await settled(peers.owner, num_leases=1)


async def test_a_lost_puller_frees_what_it_pulled(peers: Peers) -> None:
    ref = await peers.owner.put(stand_in((1000, 1000)), REQUEST, 30.0)
    pull = asyncio.create_task(peers.pull(ref))
    await asyncio.sleep(0)
    pull.cancel()
    peers.owner.forget_peer(InstanceId("puller-0-bb"))
    peers.owner.release(ref.tensor_id)
    await settled(peers.owner)


async def test_nobody_answers(peers: Peers) -> None:
    ref = await peers.owner.put(stand_in((10,)), REQUEST, 30.0)
    del peers.plane.transports[InstanceId("owner-0-aa")]
    with pytest.raises(InstanceLost):
        await peers.pull(ref)


async def test_contradictions_and_other_channels_are_refused(peers: Peers) -> None:
    ref = TensorRef(TensorId("x"), InstanceId("owner-0-aa"), (10,), "uint8", 11, 1.0)
    with pytest.raises(InternalError):
        await peers.pull(ref)
    message = PullRequest(TensorId("x"), InstanceId("p"), "gloo", 1, (10,), "uint8", 10, 1.0)
    with pytest.raises(InternalError) as caught:
        await peers.owner.on_pull(message)
    assert caught.value.code == "bad_channel"
