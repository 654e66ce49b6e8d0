"""Media bytes in memory: uploads and downloads under way, and files that are kept for a second request, under one bound.

A full store refuses, it never grows. Kept files are dropped when taken, released, or expired. Event loop only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from triptych.shared.errors import BadRequest, InstanceLost, Overloaded
from triptych.shared.messages import RequestId

TOO_LARGE_TEXT = "the image file is too large"
FULL_TEXT = "too many images wait to be decoded: try again later"


class MediaBuffer:
    """Bytes of one item, counted in the store until `close`. A context manager that closes."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self.max_bytes = store.max_item_bytes
        self.data = bytearray()

    def check(self, num_more_bytes: int) -> None:
        """Raises BadRequest (image_too_large, 413) when that many more are too many."""
        if len(self.data) + num_more_bytes > self.max_bytes:
            raise BadRequest(TOO_LARGE_TEXT, code="image_too_large", status=413)

    def append(self, chunk: bytes) -> None:
        """Raises as `check`, or Overloaded: the store is full. The buffer is then of no more use."""
        self.check(len(chunk))
        self._store.reserve(len(chunk))
        self.data += chunk

    def close(self) -> None:
        """Give the bytes back to the store. Idempotent."""
        self._store.give_back(len(self.data))
        self.data = bytearray()

    def __enter__(self) -> MediaBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Kept:
    request_id: RequestId
    buffer: MediaBuffer
    expires_at_s: float


class MediaStore:
    """At most capacity_bytes in all, max_item_bytes per item; a kept file nobody takes is dropped after expiry_s."""

    def __init__(
        self, capacity_bytes: int, max_item_bytes: int, expiry_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_item_bytes = max_item_bytes
        self.num_bytes = 0
        self._expiry_s = expiry_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def reserve(self, num_bytes: int) -> None:
        """Raises Overloaded when that many do not fit."""
        if self.num_bytes + num_bytes > self.capacity_bytes:
            self.sweep()
        if self.num_bytes + num_bytes > self.capacity_bytes:
            raise Overloaded(FULL_TEXT)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def keep(self, buffer: MediaBuffer, request_id: RequestId) -> str:
        """Take over a buffer until `take`; its media_id."""
        media_id = secrets.token_hex(16)
        self._kept[media_id] = _Kept(request_id, buffer, self._clock() + self._expiry_s)
        return media_id

    def take(self, media_id: str, request_id: RequestId) -> MediaBuffer:
        """The caller closes the buffer.

        Raises:
            InstanceLost: it is no longer here, or belongs to another request: bring it again.
        """
        self.sweep()
        kept = self._kept.get(media_id)
        if kept is None or kept.request_id != request_id:
            raise InstanceLost("the file of an image is no longer here", code="media_lost")
        del self._kept[media_id]
        return kept.buffer

    def drop(self, media_id: str | None) -> None:
        """Drop one file. Idempotent."""
        if media_id in self._kept:
            self._drop([media_id])

    def release_request(self, request_id: RequestId) -> None:
        """Drop a request's files. Idempotent."""
        self._drop([media_id for media_id, kept in self._kept.items() if kept.request_id == request_id])

    def sweep(self) -> None:
        """Drop what has expired."""
        now_s = self._clock()
        self._drop([media_id for media_id, kept in self._kept.items() if kept.expires_at_s <= now_s])

    def _drop(self, media_ids: list[str]) -> None:
        for media_id in media_ids:
            self._kept.pop(media_id).buffer.close()
