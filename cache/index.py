"""Who probably holds what: KV blocks by block key, embeddings by mm_hash, pictures by file_key. A hint, never the truth.

Holders say what they hold and drop, in their own time; readers ask once per request. An entry may be missing or stale at any
time: the holder checks again. Here the protocol and an index in memory (one process, tests, simulation); redis_index.py is
the one that processes share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import InstanceId

Kind = Literal["kv", "embeddings"]
V = TypeVar("V")
MAX_HOLDERS = 8  # chosen: of one entry; more of them would help nobody, the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Found:
    """prefixes: how many leading blocks of a prompt a holder has. embeddings: the holders of each mm_hash that anyone has.
    A holder is an instance id, so one life of a process: believe only those that the registry knows."""

    prefixes: Mapping[InstanceId, int] = field(default_factory=dict)
    embeddings: Mapping[bytes, tuple[InstanceId, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class IndexCounters:
    """num_skipped: questions not asked since the server failed lately. num_lost: hints that a full queue, or a failing
    server, made room of."""

    num_round_trips: int = 0
    num_failures: int = 0
    num_skipped: int = 0
    num_lost: int = 0


class CacheIndex(Protocol):
    """Questions take one round trip and never fail: without an answer in a short time, nothing is known. Hints are not
    awaited. One index serves all instances of a process."""

    @property
    def counters(self) -> IndexCounters: ...

    async def identify(self, file_keys: Sequence[bytes]) -> list[ImageInfo | None]:
        """The picture of each file_key, None where it is unknown."""

    async def lookup(self, block_keys: Sequence[bytes], mm_hashes: Sequence[bytes]) -> Found:
        """What is held of a prompt with these full blocks (in order) and pictures."""

    def remember(self, file_key: bytes, image: ImageInfo) -> None:
        """A hint: this file shows that picture."""

    def hold(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        """A hint: `holder` has these. Said again, it keeps them from being forgotten."""

    def drop(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        """A hint: `holder` has these no more, or never had them."""

    async def close(self) -> None:
        """Ends its tasks and connections. Idempotent."""


class MemoryIndex:
    """CacheIndex within one process. capacity: entries of each kind, the least recently held are forgotten."""

    def __init__(self, capacity: int = 100_000) -> None:  # chosen: about 20 MB
        self.counters = IndexCounters()
        self._capacity = capacity
        self._images: OrderedDict[bytes, ImageInfo] = OrderedDict()
        self._holders: dict[Kind, OrderedDict[bytes, tuple[InstanceId, ...]]] = {
            "kv": OrderedDict(),
            "embeddings": OrderedDict(),
        }

    async def identify(self, file_keys: Sequence[bytes]) -> list[ImageInfo | None]:
        self.counters.num_round_trips += 1
        return [self._images.get(key) for key in file_keys]

    async def lookup(self, block_keys: Sequence[bytes], mm_hashes: Sequence[bytes]) -> Found:
        self.counters.num_round_trips += 1
        held = self._holders["embeddings"]
        return Found(self._prefixes(block_keys), {key: held[key] for key in mm_hashes if key in held})

    def remember(self, file_key: bytes, image: ImageInfo) -> None:
        self._put(self._images, file_key, image)

    def hold(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        entries = self._holders[kind]
        for key in keys:
            others = tuple(other for other in entries.get(key, ()) if other != holder)
            self._put(entries, key, (*others, holder)[-MAX_HOLDERS:])

    def drop(self, holder: InstanceId, kind: Kind, keys: Iterable[bytes]) -> None:
        entries = self._holders[kind]
        for key in keys:
            others = tuple(other for other in entries.pop(key, ()) if other != holder)
            if others:
                entries[key] = others

    async def close(self) -> None: ...

    def _prefixes(self, block_keys: Sequence[bytes]) -> dict[InstanceId, int]:
        entries = self._holders["kv"]
        prefixes: dict[InstanceId, int] = {}
        for index, key in enumerate(block_keys):
            unbroken = [holder for holder in entries.get(key, ()) if prefixes.get(holder, 0) == index]
            if not unbroken:
                break
            prefixes.update((holder, index + 1) for holder in unbroken)
        return prefixes

    def _put(self, entries: OrderedDict[bytes, V], key: bytes, value: V) -> None:
        entries[key] = value
        entries.move_to_end(key)
        if len(entries) > self._capacity:
            entries.popitem(last=False)
