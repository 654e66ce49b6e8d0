"""What a puller can and cannot be made to read from another's arena."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from triptych.shared.errors import InstanceLost, InternalError
from triptych.shared.instance_info import TransportAddress
from triptych.shared.messages import TensorId
from triptych.shared.transport.arena import KEEP_WARM_BYTES, Arena
from triptych.shared.transport.shared_memory import PeerArena

TENSOR = TensorId("1-aa")


@pytest.fixture
def arena() -> Arena:
    return Arena(1 << 20)


def address(arena: Arena, **changes: str) -> TransportAddress:
    return TransportAddress(changes.get("path", arena.path), changes.get("token", arena.token), "127.0.0.1", 1)


def stored(arena: Arena, num_bytes: int = 1000) -> int:
    offset = arena.allocate(num_bytes)
    assert offset is not None
    arena.view(offset, num_bytes).fill_(7)
    arena.stamp(offset, TENSOR, (num_bytes,), torch.uint8)
    return offset


def test_copies_what_is_there(arena: Arena) -> None:
    offset = stored(arena)
    peer = PeerArena.open(address(arena))
    assert peer is not None
    out = torch.zeros(1000, dtype=torch.uint8)
    peer.copy(offset, TENSOR, out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("out", [torch.zeros(10, 100, dtype=torch.uint8), torch.zeros(1000, dtype=torch.int8), torch.zeros(9)])
def test_a_tensor_of_another_form_is_refused(arena: Arena, out: torch.Tensor) -> None:
    peer = PeerArena.open(address(arena))
    assert peer is not None
    with pytest.raises(InternalError):
        peer.copy(stored(arena), TENSOR, out)


def test_data_is_aligned_and_apart_from_the_token(arena: Arena) -> None:
    offsets = [stored(arena, size) for size in (0, 1, 63, 64, 65)]
    assert all(offset % 64 == 0 and offset >= mmap.PAGESIZE for offset in offsets)
    assert len(set(offsets)) == len(offsets)


def test_a_freed_or_reused_range_is_not_taken_for_the_tensor(arena: Arena) -> None:
    offset = stored(arena)
    peer = PeerArena.open(address(arena))
    assert peer is not None
    out = torch.zeros(1000, dtype=torch.uint8)
    arena.free(offset)
    with pytest.raises(InstanceLost):
        peer.copy(offset, TENSOR, out)
    assert arena.allocate(1000) == offset
    arena.stamp(offset, TensorId("2-bb"), (1000,), torch.uint8)
    with pytest.raises(InstanceLost):
        peer.copy(offset, TENSOR, out)


def test_offsets_out_of_bounds_are_refused(arena: Arena) -> None:
    peer = PeerArena.open(address(arena))
    assert peer is not None
    out = torch.zeros(1000, dtype=torch.uint8)
    for offset in (-1, 0, mmap.PAGESIZE, mmap.PAGESIZE + (1 << 20) - 999, 1 << 40):
        with pytest.raises(InternalError):
            peer.copy(offset, TENSOR, out)


def test_another_token_means_another_arena(arena: Arena) -> None:
    assert PeerArena.open(address(arena, token="0" * 32)) is None
    assert PeerArena.open(address(arena, token="")) is None


def test_only_sealed_memory_is_opened(arena: Arena, tmp_path: Path) -> None:
    """A file could be cut while we read it (SIGBUS), a pipe could block us, any other path is none of our business."""
    file = tmp_path / "file"
    file.write_bytes(arena.token.encode() + bytes(8192))
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(unsealed, arena.token.encode() + bytes(8192))
    with file.open("rb") as opened:
        paths = [str(file), f"/proc/self/fd/{opened.fileno()}", f"/proc/{os.getpid()}/fd/{opened.fileno()}"]
        paths += [f"/proc/{os.getpid()}/fd/{unsealed}", f"{arena.path}/../../environ", "/proc/1/fd/99999", ""]
        assert [PeerArena.open(address(arena, path=path)) for path in paths] == [None] * len(paths)
    os.close(unsealed)


def test_an_idle_arena_returns_its_pages() -> None:
    arena = Arena(KEEP_WARM_BYTES * 3)
    num_bytes = KEEP_WARM_BYTES * 2
    offset = stored(arena, num_bytes)
    arena.trim()
    assert allocated_bytes(arena) > num_bytes, "in use: kept"
    arena.free(offset)
    arena.trim()
    assert allocated_bytes(arena) <= KEEP_WARM_BYTES + 2 * mmap.PAGESIZE
    assert bool((arena.view(stored(arena, num_bytes), num_bytes) == 7).all())


def allocated_bytes(arena: Arena) -> int:
    return Path(arena.path).stat().st_blocks * 512
