"""Where two instances meet to form a 2-rank process group: the owner's TCPStore, on a socket that we bound ourselves.

A TCPStore given only a host listens on all interfaces, and so would Gloo by default: both are bound to bind_host here.
Groups exist per pair and epoch (no world): membership is elastic, and a broken group is never repaired, only replaced.
Blocking; called from threads.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist

from triptych.shared.errors import InternalError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import InstanceId

Backend = Literal["gloo", "nccl"]
OWNER_RANK = 0
PULLER_RANK = 1
_STORE_TIMEOUT_S = 15.0  # chosen: it answers in microseconds, but a dead name server may hold it up (shared/environment.py)
_BACKLOG = 128
_c10d: Any = dist  # torch's type stubs lack TCPStore, PrefixStore and the groups' options


class Work(Protocol):
    """A transfer under way; of torch's Work, what we use."""

    def wait(self, timeout: timedelta) -> bool:
        """Raises RuntimeError when the peer is gone or the time is over; then the group is broken."""
        ...


class Group(Protocol):
    """A 2-rank process group; of ProcessGroupGloo and ProcessGroupNCCL, what we use."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Work: ...


def pair_name(owner: InstanceId, puller: InstanceId, epoch: int) -> str:
    """Prefix of the pair's keys in the owner's store."""
    return f"{owner}/{puller}/{epoch}"


class Rendezvous:
    """Our TCPStore and our Gloo device."""

    def __init__(self, bind_host: str) -> None:
        """Raises InternalError when bind_host means all interfaces."""
        family, _, _, _, sockaddr = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(sockaddr[0]).is_unspecified:
            raise InternalError("the transport must not listen on all interfaces", code="bad_bind_host")
        self.host = str(sockaddr[0])
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self.host, 0))
            listener.listen(_BACKLOG)
            self.port: int = listener.getsockname()[1]
        except OSError:
            listener.close()
            raise
        self._store = _c10d.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
        self._device = _c10d.ProcessGroupGloo.create_device(hostname=self.host)

    def join(self, name: str, rank: int, host: str, port: int, timeout_s: float, backend: Backend) -> Group:
        """Form the group `name` with the peer that does the same, over the store at host and port.

        Raises:
            RuntimeError: the peer did not come within timeout_s, or its store is gone.
        """
        timeout = timedelta(seconds=timeout_s)
        # a client of its own for each group, also at the owner: one client's calls wait for each other
        client = _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        store = _c10d.PrefixStore(name, client)
        if backend == "nccl":
            nccl_options = _c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            return cast(Group, _c10d.ProcessGroupNCCL(store, rank, 2, nccl_options))
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = timeout
        options._threads = 1  # sends and receives run in the device's loop thread; these only serve collectives
        return cast(Group, _c10d.ProcessGroupGloo(store, rank, 2, options))

    def sweep_keys(self, live_names: Callable[[], frozenset[str]]) -> None:
        """Drop the keys of groups that are no more, so that the store doesn't grow with every epoch. live_names is called
        after the keys were listed: a group that forms meanwhile must not lose its own."""
        keys = self._store.list_keys()
        live = live_names()
        for key in keys:
            if not any(key.startswith(f"{name}/") for name in live):
                self._store.delete_key(key)

    def close(self) -> None:
        """Stop to listen. No group may be joined after this."""
        self._store = self._device = None

    @property
    def num_keys(self) -> int:
        return int(self._store.num_keys())


def address_of(rendezvous: Rendezvous, arena_path: str, arena_token: str) -> TransportAddress:
    """What peers need to know of an instance."""
    return TransportAddress(arena_path, arena_token, rendezvous.host, rendezvous.port)
