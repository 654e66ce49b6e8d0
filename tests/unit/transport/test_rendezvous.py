"""Pairs over a TCPStore: where it listens, and that keys, pairs and threads of dead epochs don't pile up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from triptych.shared.errors import InstanceLost, InternalError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import Accepted, InstanceId, Message, PairRequest, PullRequest, Reply
from triptych.shared.transport.rendezvous import Rendezvous
from triptych.shared.transport.torch_distributed import Owners, Pullers

OWNER, PULLER = InstanceId("owner-0-aa"), InstanceId("puller-0-bb")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_refuses_to_listen_on_all_interfaces(host: str) -> None:
    with pytest.raises(InternalError):
        Rendezvous(host)


class Sides(NamedTuple):
    plane: Plane
    rendezvous: Rendezvous
    theirs: Rendezvous
    pullers: Pullers
    owners: Owners
    address: TransportAddress


class Plane:
    """Hands PairRequest to the owner's side."""

    pullers: Pullers

    async def request(self, instance_id: InstanceId, message: Message, timeout_s: float) -> Reply:
        assert isinstance(message, PairRequest)
        self.pullers.accept(message, message.timeout_s)
        return Accepted()

    async def publish(self, instance_id: InstanceId, message: Message) -> None:
        raise AssertionError("pairs need no events")


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    with ThreadPoolExecutor(1) as copies:
        plane = Plane()
        rendezvous, theirs = Rendezvous("127.0.0.1"), Rendezvous("127.0.0.1")
        pullers = plane.pullers = Pullers(OWNER, rendezvous, copies)
        owners = Owners(PULLER, theirs, plane)
        yield Sides(plane, rendezvous, theirs, pullers, owners, TransportAddress("", "", rendezvous.host, rendezvous.port))
        await owners.close()
        await pullers.close()
        rendezvous.close()
        theirs.close()


async def transfer(sides: Sides, transfer_id: int) -> int:
    """One transfer over the live pair; its epoch."""
    deadline_s = asyncio.get_running_loop().time() + 10
    pair = await sides.owners.pair_with(OWNER, sides.address, "gloo", deadline_s)
    data, out = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    request = PullRequest("t", PULLER, "gloo", transfer_id, (100,), "uint8", 100, 5.0, pair.epoch)  # type: ignore[arg-type]
    await sides.pullers.send(request, lambda: data, 5.0)
    await pair.receive(transfer_id, out, 5.0)
    await sides.pullers.finish(PULLER, transfer_id)
    assert torch.equal(data, out)
    return pair.epoch


async def test_a_pair_is_formed_once(sides: Sides) -> None:
    assert [await transfer(sides, index) for index in range(3)] == [1, 1, 1]


async def test_simultaneous_first_pulls_form_one_pair(sides: Sides) -> None:
    assert set(await asyncio.gather(*(transfer(sides, index) for index in range(4)))) == {1}


async def test_dead_epochs_leave_nothing_behind(sides: Sides) -> None:
    await transfer(sides, 0)
    sizes = []
    for index in range(1, 13):
        sides.owners.forget(OWNER)
        assert await transfer(sides, index) == index + 1
        sizes.append((sides.rendezvous.num_keys, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    keys, threads, files = zip(*sizes, strict=True)
    assert max(keys) <= 4, "two keys for each side of a pair, at most one old pair"
    assert threads[-1] <= threads[2] + 3
    assert files[-1] <= files[2] + 6


async def test_a_sweep_spares_a_group_that_forms_meanwhile(sides: Sides) -> None:
    """The first pair's sweep is late: the second puller has written its keys by then, the owner not yet."""
    sweep, join, store = sides.rendezvous.sweep_keys, sides.rendezvous.join, sides.rendezvous._store
    entered, has_swept = threading.Event(), threading.Event()
    other = InstanceId("puller-1-cc")

    def late_sweep(live_names: Callable[[], frozenset[str]]) -> None:
        if not entered.is_set():
            entered.set()
            while not any(f"/{other}/" in key for key in store.list_keys()):
                assert not has_swept.wait(0.01)
            sweep(live_names)
            has_swept.set()

    def late_join(*args: Any) -> Any:
        assert has_swept.wait(10)
        return join(*args)

    sides.rendezvous.sweep_keys = late_sweep  # type: ignore[method-assign]
    sides.rendezvous.join = late_join  # type: ignore[method-assign]
    others = Owners(other, sides.theirs, sides.plane)
    first = asyncio.create_task(transfer(sides, 0))
    await asyncio.to_thread(entered.wait, 10)
    pair = await others.pair_with(OWNER, sides.address, "gloo", asyncio.get_running_loop().time() + 10)
    assert not pair.is_closed
    assert await first == 1
    await others.close()


async def test_another_epoch_is_a_typed_miss(sides: Sides) -> None:
    epoch = await transfer(sides, 0)
    request = PullRequest("t", PULLER, "gloo", 1, (1,), "uint8", 1, 5.0, epoch + 1)  # type: ignore[arg-type]
    with pytest.raises(InstanceLost) as lost:
        await sides.pullers.send(request, lambda: torch.zeros(1, dtype=torch.uint8), 5.0)
    assert lost.value.code == "pair_lost"
    with pytest.raises(InternalError):
        sides.pullers.accept(PairRequest(PULLER, epoch, 5.0), 5.0)


async def test_an_owner_that_dropped_the_pair_is_seen_at_once(sides: Sides) -> None:
    await transfer(sides, 0)
    pair = await sides.owners.pair_with(OWNER, sides.address, "gloo", asyncio.get_running_loop().time() + 10)
    await sides.pullers.drop(PULLER)
    with pytest.raises(InstanceLost):
        await asyncio.wait_for(pair.receive(1, torch.zeros(9, dtype=torch.uint8), 10.0), 8.0)
    sides.owners.discard(OWNER, pair)
    assert await transfer(sides, 2) > pair.epoch
