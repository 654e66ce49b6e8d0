"""Which engines on this machine compute at the moment, so that each takes the cores that the others leave to it.

Each has bytes of its own in a file that all of a user's engines here know, and locks as many as it has threads, while it
computes, in that part of the file which is for what it computes. Nobody waits for a lock, and the system takes back what a dead
process held. Linux's locks of open files are what this needs.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: type, whence, start, length, pid
_PLACE_BITS = 48  # chosen: no two engines ever meet, and offsets of files have 63
_PART = 1 << 49  # of the file: all places of one rank


class Rank(IntEnum):
    """What somebody computes: a first token that takes long, one that does not, or what can wait for both."""

    LONG = 0
    BRIEF = 1
    LAST = 2


class Cores(Protocol):
    """What an engine computes with."""

    def take(self, rank: Rank) -> None:
        """Compute from now on; on its thread: with what others leave."""
        ...

    def take_again(self) -> None:
        """The same between two parts of a computation: without what others need by now."""
        ...

    def rest(self) -> None:
        """A computation is over: the cores are kept for one that may follow at once, but others may be first."""
        ...

    def others_compute(self, rank: Rank) -> bool:
        """Something of that rank."""
        ...

    def leave(self) -> None:
        """Compute no more."""
        ...


class OwnCores:
    """Implements Cores, of an engine whose number of threads stays."""

    def take(self, rank: Rank) -> None:
        """It has what it needs."""

    def take_again(self) -> None:
        """Nothing has changed."""

    def rest(self) -> None:
        """Nobody else wants them."""

    def others_compute(self, rank: Rank) -> bool:
        return False

    def leave(self) -> None:
        """Nobody to tell."""


def shared_cores(path: str, num_cores: int, least: int, set_num_threads: Callable[[int], None]) -> Cores:
    """Of all engines that know the file: with no path, those that this user has on this machine, outside of containers. This
    one's own, where the file cannot be had or the system has no such locks."""
    try:
        return SharedCores(Path(path or _default_path()), num_cores, least, set_num_threads)
    except (OSError, AttributeError):
        return OwnCores()


def _default_path() -> Path:
    return Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}.cores"


class SharedCores:
    """Implements Cores.

    Args:
        path: of the file, which is made when it is not there.
        num_cores: that the engines share.
        least: threads that an engine has even when all others compute.
        set_num_threads: called when their number changes.

    Raises:
        OSError, AttributeError: the file cannot be had, or there are no such locks.
    """

    def __init__(self, path: Path, num_cores: int, least: int, set_num_threads: Callable[[int], None]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._num_cores = num_cores
        self._least = least
        self._set_num_threads = set_num_threads
        self._num_threads = 0
        self._place = secrets.randbits(_PLACE_BITS)
        self._rank = Rank.LAST
        self.leave()

    def take(self, rank: Rank) -> None:
        self._move(rank)
        self.take_again()

    def take_again(self) -> None:
        used = self._used(0, len(Rank) * _PART)
        num_idle = self._num_cores - sum(used)
        num_threads = max(self._least, min(num_idle, self._num_cores // (1 + len(used))))
        self._lock(fcntl.F_WRLCK, 0, num_threads)
        if num_threads < self._num_threads:
            self._lock(fcntl.F_UNLCK, num_threads, self._num_threads)
        if num_threads != self._num_threads:
            self._set_num_threads(num_threads)
            self._num_threads = num_threads

    def rest(self) -> None:
        self._move(Rank.LAST)
        self._lock(fcntl.F_WRLCK, 0, self._num_threads)

    def others_compute(self, rank: Rank) -> bool:
        return bool(self._used(rank * _PART, (rank + 1) * _PART))

    def leave(self) -> None:
        self._lock(fcntl.F_UNLCK, 0, max(self._num_cores, self._least))

    def close(self) -> None:
        """As the system does for a process that has ended."""
        os.close(self._file)

    def _move(self, rank: Rank) -> None:
        if rank != self._rank:
            self.leave()
            self._rank = rank

    def _lock(self, kind: int, begin: int, end: int) -> None:
        """The bytes of so many threads."""
        place = self._place + self._rank * _PART
        self._ask(fcntl.F_OFD_SETLK, kind, place + begin, end - begin)

    def _used(self, begin: int, end: int) -> list[int]:
        """Threads of each other engine that computes, of those with a place in [begin, end). The system names any one lock that
        stands there."""
        if begin >= end:
            return []
        kind, _, found, length, _ = self._ask(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, begin, end - begin)
        if kind == fcntl.F_UNLCK:
            return []
        return [length, *self._used(begin, found), *self._used(found + length, end)]

    def _ask(self, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
        answer = fcntl.fcntl(self._file, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
        return _FLOCK.unpack(answer)
