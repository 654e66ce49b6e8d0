"""One instance's tensor memory: a sealed memfd, mapped once, that same-host peers can map read-only.

The kernel frees it with the process, whatever its end. Layout: a first page with the probe token, then ranges of
`allocator.FirstFit`, each with a stamp of STAMP_BYTES (which tensor it is, zeroed when the range is freed) before its data:

    | token ... | stamp | data ... | stamp | data ... |

A reader checks the stamp after its copy, so a range that was freed meanwhile is never taken for the tensor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets

import torch

from triptych.shared.messages import TensorId
from triptych.shared.transport.allocator import FirstFit
from triptych.shared.transport.layout import copy_into, shaped
from triptych.shared.transport.memory import STAMP_BYTES, num_bytes_of

TOKEN_BYTES = 32
KEEP_WARM_BYTES = 32 << 20  # chosen: pages that an idle arena keeps; the rest goes back to the system


def stamp_of(tensor_id: TensorId, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What lies before the data of a live tensor: which it is and, as far as there is room, what."""
    return f"{tensor_id} {dtype} {shape}".encode()[:STAMP_BYTES].ljust(STAMP_BYTES, b"\0")


class Arena:
    """Implements `TensorMemory`; offsets are counted from the start of the file."""

    def __init__(self, capacity_bytes: int) -> None:
        self.allocator = FirstFit(capacity_bytes)
        self._fd = os.memfd_create("triptych-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = mmap.PAGESIZE + self.allocator.capacity_bytes
        os.ftruncate(self._fd, size)
        # a sealed size means that a reader's mapping can never fault, whatever becomes of us
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._high_bytes = 0
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._map[:TOKEN_BYTES] = self.token.encode()

    def allocate(self, num_bytes: int) -> int | None:
        start = self.allocator.allocate(STAMP_BYTES + num_bytes)
        if start is None:
            return None
        self._high_bytes = max(self._high_bytes, start + STAMP_BYTES + num_bytes)
        return mmap.PAGESIZE + start + STAMP_BYTES

    def stamp(self, offset: int, tensor_id: TensorId, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._map[offset - STAMP_BYTES : offset] = stamp_of(tensor_id, shape, dtype)

    def free(self, offset: int) -> None:
        self._map[offset - STAMP_BYTES : offset] = bytes(STAMP_BYTES)
        self.allocator.free(offset - STAMP_BYTES - mmap.PAGESIZE)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The data at offset as 1-D uint8; valid until it is freed."""
        return self._bytes[offset : offset + num_bytes]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return shaped(self.view(offset, num_bytes_of(shape, dtype)), shape, dtype)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        copy_into(destination, source)

    def trim(self) -> None:
        """The pages go back, except the first KEEP_WARM_BYTES."""
        if self.allocator.used_bytes or self._high_bytes <= KEEP_WARM_BYTES:
            return
        start = mmap.PAGESIZE + KEEP_WARM_BYTES
        self._map.madvise(mmap.MADV_REMOVE, start, len(self._map) - start)
        self._high_bytes = KEEP_WARM_BYTES

    def close(self) -> None:
        """Close the file; the mapping goes with the last view of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
