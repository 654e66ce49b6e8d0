"""Transfers over torch.distributed: pairs of instances, formed lazily, broken ones rebuilt under a new epoch.

The puller asks the owner with PairRequest; both then join the group named by (owner, puller, epoch) in threads.
`Pullers` is what an owner keeps of those who pull from it; `Owners` what a puller keeps of those it pulls from.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Executor

import torch

from triptych.shared.errors import DeadlineExceeded, InternalError, Overloaded
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import InstanceId, PairRequest, PullRequest
from triptych.shared.transport.api import ControlPlane
from triptych.shared.transport.pair import Pair, pair_lost
from triptych.shared.transport.rendezvous import OWNER_RANK, PULLER_RANK, Backend, Rendezvous, pair_name
from triptych.shared.transport.threads import in_thread

MAX_PAIRS = 256  # chosen: peers of one instance; each pair is a socket and a thread or two


def backend_of(device: torch.device) -> Backend:
    """NCCL moves device memory, Gloo host memory."""
    return "nccl" if device.type == "cuda" else "gloo"


class Pullers:
    """The owner's side. At most one pair per puller: a new epoch replaces the old one."""

    def __init__(self, instance_id: InstanceId, rendezvous: Rendezvous, copies: Executor) -> None:
        self._instance_id = instance_id
        self._rendezvous = rendezvous
        self._copies = copies
        self._joins: dict[InstanceId, tuple[int, asyncio.Task[Pair]]] = {}
        self._names: frozenset[str] = frozenset()  # of the groups in _joins, to be read by threads

    def accept(self, message: PairRequest, timeout_s: float) -> None:
        """Begin to join the puller's new group.

        Raises:
            Overloaded: too many pairs. InternalError: an old epoch.
        """
        known = self._joins.get(message.puller)
        if known is None and len(self._joins) >= MAX_PAIRS:
            raise Overloaded("too many transfer pairs", code="too_many_pairs")
        if known is not None and known[0] >= message.epoch:
            raise InternalError("an epoch of a transfer pair came twice", code="bad_epoch")
        join = asyncio.create_task(self._join(message, timeout_s, known[1] if known else None))
        join.add_done_callback(_retrieve)
        self._joins[message.puller] = message.epoch, join
        self._note_names()

    async def send(self, message: PullRequest, view: Callable[[], torch.Tensor], timeout_s: float) -> None:
        """Post the send of a pinned tensor's bytes. view is called when the pair is there: the puller may have given up the
        transfer while it formed.

        Raises:
            InstanceLost: there is no such pair (code pair_lost). DeadlineExceeded: it did not form in time.
        """
        epoch, join = self._joins.get(message.puller, (0, None))
        if join is None or epoch != message.epoch:
            raise pair_lost()
        try:
            async with asyncio.timeout(timeout_s):
                pair = await asyncio.shield(join)
        except TimeoutError:
            raise DeadlineExceeded("a transfer pair did not form in time") from None
        except RuntimeError as error:
            raise pair_lost() from error
        # in a thread: a ready receiver makes the send write to the socket at once
        await asyncio.get_running_loop().run_in_executor(self._copies, pair.post_send, message.transfer_id, view())

    async def finish(self, puller: InstanceId, transfer_id: int) -> None:
        """A transfer is over: its memory is no longer read when this returns."""
        pair = self._pair(puller)
        if pair is not None and not await pair.finish_send(transfer_id):
            await self.drop(puller)

    async def drop(self, puller: InstanceId) -> None:
        """Close the pair with a puller, if there is one."""
        _, join = self._joins.pop(puller, (0, None))
        if join is not None:
            self._note_names()
            await _close(join)

    def has(self, puller: InstanceId) -> bool:
        return puller in self._joins

    async def close(self) -> None:
        for puller in tuple(self._joins):
            await self.drop(puller)

    def _pair(self, puller: InstanceId) -> Pair | None:
        _, join = self._joins.get(puller, (0, None))
        if join is None or not join.done() or join.cancelled() or join.exception() is not None:
            return None
        return join.result()

    async def _join(self, message: PairRequest, timeout_s: float, previous: asyncio.Task[Pair] | None) -> Pair:
        if previous is not None:
            await _close(previous)
        name = pair_name(self._instance_id, message.puller, message.epoch)
        rendezvous = self._rendezvous

        def join() -> Pair:
            rendezvous.sweep_keys(lambda: self._names)
            group = rendezvous.join(name, OWNER_RANK, rendezvous.host, rendezvous.port, timeout_s, message.channel)
            return Pair(group, message.epoch, message.channel)

        return await in_thread(join)

    def _note_names(self) -> None:
        self._names = frozenset(pair_name(self._instance_id, puller, epoch) for puller, (epoch, _) in self._joins.items())


class Owners:
    """The puller's side: one pair per owner, formed by the first pull that needs it."""

    def __init__(self, instance_id: InstanceId, rendezvous: Rendezvous, control: ControlPlane) -> None:
        self._instance_id = instance_id
        self._rendezvous = rendezvous
        self._control = control
        self._pairs: dict[InstanceId, Pair] = {}
        self._forming: dict[InstanceId, asyncio.Task[Pair]] = {}
        self._epochs = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()

    async def pair_with(self, owner: InstanceId, address: TransportAddress, backend: Backend, deadline_s: float) -> Pair:
        """The live pair with an owner, or a new one.

        Raises:
            InstanceLost: the owner is gone, or the group did not form (code pair_lost). DeadlineExceeded: in time.
        """
        pair = self._pairs.get(owner)
        if pair is not None and not pair.is_closed and pair.backend == backend:
            return pair
        forming = self._forming.get(owner)
        if forming is None:
            if len(self._forming) + len(self._pairs) >= MAX_PAIRS:
                raise Overloaded("too many transfer pairs", code="too_many_pairs")
            forming = asyncio.create_task(self._form(owner, address, backend, deadline_s))
            self._forming[owner] = forming
            forming.add_done_callback(lambda task: self._formed(owner, task))
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await asyncio.shield(forming)
        except TimeoutError:
            raise DeadlineExceeded("a transfer pair did not form in time") from None
        except RuntimeError as error:
            raise pair_lost() from error

    def discard(self, owner: InstanceId, pair: Pair) -> None:
        """A pair has failed: the next pull forms a new one."""
        if self._pairs.get(owner) is pair:
            del self._pairs[owner]
        closing = asyncio.create_task(pair.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def forget(self, owner: InstanceId) -> None:
        """An owner is gone."""
        self._forming.pop(owner, None)
        pair = self._pairs.get(owner)
        if pair is not None:
            self.discard(owner, pair)

    async def close(self) -> None:
        for owner in {*self._pairs, *self._forming}:
            self.forget(owner)
        if self._closing:
            await asyncio.wait(self._closing, timeout=5.0)

    def _formed(self, owner: InstanceId, task: asyncio.Task[Pair]) -> None:
        _retrieve(task)
        if self._forming.get(owner) is task:
            del self._forming[owner]

    async def _form(self, owner: InstanceId, address: TransportAddress, backend: Backend, deadline_s: float) -> Pair:
        """A client of a stopped owner's TCPStore can hang for longer than its timeout: then this stays unfinished, later
        pulls of that owner run into their deadlines here, and only one thread hangs."""
        epoch = next(self._epochs)
        timeout_s = deadline_s - time.monotonic()
        request = PairRequest(self._instance_id, epoch, timeout_s, backend)
        await self._control.request(owner, request, timeout_s)
        name = pair_name(owner, self._instance_id, epoch)
        rendezvous = self._rendezvous

        def join() -> Pair:
            group = rendezvous.join(name, PULLER_RANK, address.store_host, address.store_port, timeout_s, backend)
            return Pair(group, epoch, backend)

        pair = await in_thread(join)
        if self._forming.get(owner) is not asyncio.current_task():  # forgotten meanwhile
            pair.drop()
            raise pair_lost()
        replaced = self._pairs.get(owner)
        if replaced is not None:
            self.discard(owner, replaced)
        self._pairs[owner] = pair
        return pair


async def _close(join: asyncio.Task[Pair]) -> None:
    """Close the pair that a join has made or is still making (the join itself cannot be stopped, only outlived)."""
    if not join.done():
        join.add_done_callback(_drop_result)
        return
    if not join.cancelled() and join.exception() is None:
        await join.result().close()


def _drop_result(join: asyncio.Future[Pair]) -> None:
    if not join.cancelled() and join.exception() is None:
        join.result().drop()


def _retrieve(future: asyncio.Future[Pair]) -> None:
    if not future.cancelled():
        future.exception()
