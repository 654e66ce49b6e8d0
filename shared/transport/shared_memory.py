"""The puller's side of shared memory: a same-host peer's arena, mapped read-only once per peer, copied with one memcpy.

A peer is usable when its arena's path opens here and the probe token lies there: another host, container or user fails
that test, which is remembered until the peer is forgotten. Nothing that the peer does can fault us: only sealed memfds
are mapped, and offsets are checked against the size.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
from concurrent.futures import Executor

import numpy as np
import torch

from triptych.shared.errors import InternalError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import InstanceId, TensorId
from triptych.shared.transport.arena import TOKEN_BYTES, stamp_of
from triptych.shared.transport.layout import raw_bytes
from triptych.shared.transport.lease import tensor_gone
from triptych.shared.transport.memory import STAMP_BYTES

MAX_PEERS = 1024  # chosen: mapped peers; the oldest is forgotten
_ARENA_PATH = re.compile(r"/proc/\d+/fd/\d+")  # the only paths that a peer can make us open


class PeerArena:
    """A peer's arena in our address space."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def open(cls, address: TransportAddress) -> PeerArena | None:
        """None when the arena is not reachable from here."""
        if not _ARENA_PATH.fullmatch(address.arena_path):
            return None
        try:
            fd = os.open(address.arena_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return None
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        is_same = mapping[:TOKEN_BYTES] == address.arena_token.encode()
        return cls(mapping) if is_same else None

    def copy(self, offset: int, tensor_id: TensorId, destination: torch.Tensor) -> None:
        """Copy a tensor out, pinned or not, without the GIL.

        Raises:
            InstanceLost: it is not there, or was freed while we copied.
            InternalError: the offset is out of bounds, or it is of another shape or dtype.
        """
        raw = raw_bytes(destination).numpy()
        if not mmap.PAGESIZE + STAMP_BYTES <= offset <= len(self._bytes) - len(raw):
            raise InternalError("a tensor's offset is outside its owner's arena", code="tensor_mismatch")
        np.copyto(raw, self._bytes[offset : offset + len(raw)])
        found = self._mapping[offset - STAMP_BYTES : offset]
        if not found.startswith(f"{tensor_id} ".encode()):
            raise tensor_gone()
        if found != stamp_of(tensor_id, tuple(destination.shape), destination.dtype):
            raise InternalError("the puller expects another shape or dtype than is stored", code="tensor_mismatch")


class SharedMemory:
    """The arenas of all peers that we pulled from."""

    def __init__(self, copies: Executor) -> None:
        self._copies = copies
        self._peers: dict[InstanceId, PeerArena | None] = {}

    def arena_of(self, owner: InstanceId, address: TransportAddress) -> PeerArena | None:
        """The owner's arena, or None when it cannot be used from here."""
        if owner not in self._peers:
            if len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[owner] = PeerArena.open(address)
        return self._peers[owner]

    async def copy(self, arena: PeerArena, offset: int, tensor_id: TensorId, destination: torch.Tensor) -> None:
        """`copy_now` in a thread."""
        await asyncio.get_running_loop().run_in_executor(self._copies, self.copy_now, arena, offset, tensor_id, destination)

    def copy_now(self, arena: PeerArena, offset: int, tensor_id: TensorId, destination: torch.Tensor) -> None:
        """Copy a tensor into a contiguous destination; see `PeerArena.copy`."""
        host = destination if destination.device.type == "cpu" else torch.empty(destination.shape, dtype=destination.dtype)
        arena.copy(offset, tensor_id, host)
        if host is not destination:
            destination.copy_(host)

    def forget(self, owner: InstanceId) -> None:
        self._peers.pop(owner, None)
