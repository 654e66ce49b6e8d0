"""One live 2-rank group between an owner and a puller, and its transfers. The group is used until something fails.

Every wait has an explicit timeout (Gloo's own is 30 minutes) and an expired wait breaks the group for good, on both sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from triptych.shared.errors import InstanceLost
from triptych.shared.transport.layout import raw_bytes
from triptych.shared.transport.rendezvous import OWNER_RANK, PULLER_RANK, Backend, Group, Work
from triptych.shared.transport.threads import in_thread

MAX_PIECES = 1 << 12  # of one transfer; each has a tag of its own, from transfer_id on
_PIECE_BYTES = 4 << 20  # measured, 64 MB on loopback: 1.8 times as fast over Gloo as in one piece, 1 and 16 MB a little less
MAX_TRANSFERS = 2  # chosen: waits of one pair at once; two keep the link busy, and one sick peer can hold no more threads
_FINISH_TIMEOUT_S = 1.0  # chosen: the puller has everything when it says so; only our own bookkeeping may lag


def pair_lost() -> InstanceLost:
    """The group is gone; the tensor may still be there: form a new group and pull again."""
    return InstanceLost("a transfer between two instances broke", code="pair_lost")


class Pair:
    """NCCL matches by order, not by tag: there only one transfer runs at a time."""

    def __init__(self, group: Group, epoch: int, backend: Backend) -> None:
        self.epoch = epoch
        self.backend = backend
        self._group: Group | None = group
        self._slots = asyncio.Semaphore(1 if backend == "nccl" else MAX_TRANSFERS)
        self._sends: dict[int, tuple[list[Work], torch.Tensor]] = {}

    @property
    def is_closed(self) -> bool:
        return self._group is None

    @property
    def slots(self) -> asyncio.Semaphore:
        """Held by the puller for a whole transfer."""
        return self._slots

    def post_send(self, transfer_id: int, raw: torch.Tensor) -> None:
        """Start sending 1-D uint8 `raw` to the puller; it must stay as it is until `finish_send` or `close`. Called from a
        thread, while the loop may drop the group.

        Raises:
            InstanceLost: the group is broken (code pair_lost).
        """
        group, sends = self._group, self._sends
        if group is None:
            raise pair_lost()
        tensor = raw if self.backend == "gloo" else raw.cuda()
        works, _ = sends[transfer_id] = [], tensor
        try:
            for tag, piece in enumerate(self._pieces(tensor), transfer_id):
                works.append(group.send([piece], PULLER_RANK, tag))
        except RuntimeError as error:
            raise pair_lost() from error

    async def finish_send(self, transfer_id: int) -> bool:
        """The puller says that the transfer is over; False when the send is not, which breaks the group."""
        if transfer_id not in self._sends:
            return True
        works, _ = self._sends.pop(transfer_id)
        try:
            await in_thread(lambda: _wait_for_all(works, _FINISH_TIMEOUT_S))
        except RuntimeError:
            return False
        return True

    async def receive(self, transfer_id: int, destination: torch.Tensor, timeout_s: float) -> None:
        """Receive exactly destination's bytes: the owner has agreed to that size, a longer send would abort our process.

        Raises:
            InstanceLost: the peer or the group is gone (code pair_lost), or timeout_s passed.
        """
        group = self._group
        if group is None:
            raise pair_lost()
        raw = raw_bytes(destination)

        def wait_for_bytes() -> None:
            pieces = enumerate(self._pieces(raw), transfer_id)
            _wait_for_all([group.recv([piece], OWNER_RANK, tag) for tag, piece in pieces], timeout_s)
            if self.backend == "nccl":
                torch.cuda.synchronize()

        try:
            await in_thread(wait_for_bytes)
        except RuntimeError as error:
            raise pair_lost() from error

    def _pieces(self, raw: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same on both sides; NCCL sends everything in one."""
        num_bytes = len(raw) if self.backend == "nccl" else max(_PIECE_BYTES, -(-len(raw) // MAX_PIECES))
        return torch.split(raw, max(num_bytes, 1))

    def drop(self) -> asyncio.Future[None]:
        """Drop the group; when the future is done nothing reads the memory of our sends any more."""
        doomed: list[object] = [self._group, self._sends]
        self._group, self._sends = None, {}
        return in_thread(doomed.clear)  # the destructors join threads

    async def close(self) -> None:
        await asyncio.wait([self.drop()], timeout=_FINISH_TIMEOUT_S)


def _wait_for_all(works: Sequence[Work], timeout_s: float) -> None:
    """For all of them. Raises RuntimeError as Work.wait does."""
    deadline_s = time.monotonic() + timeout_s
    for work in works:
        work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
