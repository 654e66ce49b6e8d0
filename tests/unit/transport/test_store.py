"""The store's books, without any transfer: indexes, expiry, cancelled and failed writes, and what ends a lease."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from support.transport import until
from triptych.shared.errors import InstanceLost, InternalError, Overloaded, TriptychError
from triptych.shared.messages import InstanceId, PullRequest, RequestId, TensorRef
from triptych.shared.transport import store as store_module
from triptych.shared.transport.arena import Arena
from triptych.shared.transport.lease import MAX_PULLS, PullKey
from triptych.shared.transport.memory import INLINE_COPY_BYTES
from triptych.shared.transport.store import TensorStore

REQUEST = RequestId("request-1")
PULLER = InstanceId("puller-0-bb")
LONG_BYTES = INLINE_COPY_BYTES + 1


@pytest.fixture
async def store() -> AsyncIterator[TensorStore]:
    with ThreadPoolExecutor(2) as copies, ThreadPoolExecutor(2) as writers:
        store = TensorStore(InstanceId("owner-0-aa"), Arena(8 << 20), copies, writers, 5.0)
        yield store
        await store.close()


def pull_of(ref: TensorRef, transfer_id: int = 1, timeout_s: float = 5.0) -> PullRequest:
    return PullRequest(ref.tensor_id, PULLER, "gloo", transfer_id, ref.shape, ref.dtype, ref.num_bytes, timeout_s)


async def test_the_sweep_looks_at_all_leases(store: TensorStore) -> None:
    for lease_s in (100.0, 1.0, 200.0, 2.0, 50.0):
        await store.put(torch.ones(3), REQUEST, lease_s)
    now_s = time.monotonic()
    store.sweep(now_s + 3)
    assert store.usage()[2] == 3
    store.sweep(now_s + 150)
    assert store.usage()[2] == 1
    store.check_integrity()


async def test_expiry_waits_for_the_pull(store: TensorStore) -> None:
    ref = await store.put(torch.ones(3), REQUEST, 1.0)
    lease = await store.begin_pull(pull_of(ref))
    store.sweep(time.monotonic() + 10)
    assert torch.equal(store.tensor(lease), torch.ones(3))
    with pytest.raises(InstanceLost):
        await store.begin_pull(pull_of(ref, 2))
    due = store.pulls(due_s=time.monotonic() + 6)
    assert due == [(ref.tensor_id, PullKey(PULLER, 1))]
    assert store.pulls(due_s=time.monotonic()) == []
    store.end_pull(*due[0])
    assert store.usage()[::2] == (0, 0)


async def test_a_put_cancelled_while_it_copies_leaks_nothing(store: TensorStore) -> None:
    entered, may_go = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        def is_contiguous(self) -> bool:  # type: ignore[override]  # asked by the copy, in its thread
            entered.set()
            assert may_go.wait(5)
            return False

    task = asyncio.create_task(store.put(torch.zeros(LONG_BYTES, dtype=torch.uint8).as_subclass(Slow), REQUEST, 9.0))
    await until(entered.is_set)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert store.usage()[0] > 0, "the thread still writes there"
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.usage()[::2] == (0, 0)
    store.check_integrity()


async def test_dtypes_that_cannot_travel_are_refused(store: TensorStore) -> None:
    with pytest.raises(InternalError):
        await store.put(torch.zeros(3, dtype=torch.complex64), REQUEST, 9.0)
    assert store.usage()[0] == 0


async def test_bounds(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = await store.put(torch.zeros(0), REQUEST, 9.0)
    for index in range(MAX_PULLS):
        await store.begin_pull(pull_of(ref, index))
    with pytest.raises(Overloaded):
        await store.begin_pull(pull_of(ref, MAX_PULLS))
    monkeypatch.setattr(store_module, "MAX_LEASES", 1)
    with pytest.raises(Overloaded):
        await store.put(torch.zeros(0), REQUEST, 9.0)


async def test_an_on_release_that_fails_stops_nobody(store: TensorStore, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("bug")

    released: list[int] = []
    await store.put_lazy((1,), torch.uint8, REQUEST, 9.0, lambda _: None, fail)
    await store.put_lazy((1,), torch.uint8, REQUEST, 9.0, lambda _: None, lambda: released.append(1))
    store.release_request(REQUEST)
    assert released == [1]
    assert "on_release" in caplog.text


async def test_closed_while_a_lazy_tensor_is_written(store: TensorStore) -> None:
    entered, may_go = threading.Event(), threading.Event()
    released: list[bool] = []

    def write(destination: torch.Tensor) -> None:
        entered.set()
        assert may_go.wait(5)
        destination.fill_(1)

    ref = await store.put_lazy((9,), torch.uint8, REQUEST, 9.0, write, lambda: released.append(may_go.is_set()))
    pull = asyncio.create_task(store.begin_pull(pull_of(ref)))
    await until(entered.is_set)
    close = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    assert released == [], "the blocks are being read"
    may_go.set()
    await close
    assert released == [True]
    with pytest.raises(InstanceLost):
        await pull
    with pytest.raises(Overloaded):
        await store.put(torch.zeros(3), REQUEST, 9.0)


async def test_random_lives(store: TensorStore) -> None:
    """Puts, lazy puts, pulls, releases and expiries in random order and at once: the books balance, nothing stays."""
    rng = random.Random(7)
    counts = {"leased": 0, "released": 0}

    def on_release() -> None:
        counts["released"] += 1

    async def one(index: int) -> None:
        request_id = RequestId(f"request-{index % 5}")
        size = rng.choice([0, 1, 1000, LONG_BYTES])
        try:
            if rng.random() < 0.5:
                ref = await store.put(torch.zeros(size, dtype=torch.uint8), request_id, rng.choice([0.5, 60]))
            else:
                write = rng.choice([lambda tensor: tensor.fill_(index % 100), lambda tensor: tensor[size]])  # the second fails
                ref = await store.put_lazy((size,), torch.uint8, request_id, rng.choice([0.01, 60]), write, on_release)
                counts["leased"] += 1
            for transfer_id in range(rng.randrange(3)):
                pull = pull_of(ref, transfer_id, rng.choice([0.01, 5]))
                if rng.random() < 0.2:
                    pull = msgspec.structs.replace(pull, num_bytes=size + 1)
                await store.begin_pull(pull)
                await asyncio.sleep(0)
                store.sweep(time.monotonic())
                if rng.random() < 0.8:
                    store.end_pull(ref.tensor_id, PullKey(PULLER, transfer_id))
                if rng.random() < 0.4:
                    store.release(ref.tensor_id)
            if rng.random() < 0.2:
                store.release_request(request_id)
        except TriptychError:
            store.check_integrity()

    await asyncio.gather(*(one(index) for index in range(300)))
    store.check_integrity()
    for tensor_id, key in store.pulls(PULLER):
        store.end_pull(tensor_id, key)
    store.sweep(time.monotonic() + 100)
    await until(lambda: store.usage()[::2] == (0, 0))
    store.check_integrity()
    assert counts["leased"] == counts["released"] > 50
