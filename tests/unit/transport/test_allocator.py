"""First fit: whatever is allocated and freed in whatever order, ranges don't overlap and free space comes together again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.shared.transport.allocator import ALIGN_BYTES, FirstFit, aligned


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=80), st.integers(0, 10_000))
def test_books_balance(steps: list[tuple[bool, int]], capacity_bytes: int) -> None:
    allocator = FirstFit(capacity_bytes)
    live: dict[int, int] = {}
    for is_free, number in steps:
        if is_free and live:
            offset = sorted(live)[number % len(live)]
            allocator.free(offset)
            del live[offset]
        elif (given_offset := allocator.allocate(number)) is not None:
            assert given_offset % ALIGN_BYTES == 0
            assert given_offset + number <= allocator.capacity_bytes
            assert all(given_offset + number <= o or o + n <= given_offset for o, n in live.items())
            live[given_offset] = number
        allocator.check_integrity()
    assert allocator.used_bytes == sum(aligned(number) for number in live.values())
    for offset in live:
        allocator.free(offset)
    allocator.check_integrity()
    assert allocator.used_bytes == 0
    assert capacity_bytes < ALIGN_BYTES or allocator.allocate(allocator.capacity_bytes) == 0


def test_the_first_range_that_fits_is_taken() -> None:
    allocator = FirstFit(10 * ALIGN_BYTES)
    offsets = [allocator.allocate(2 * ALIGN_BYTES) for _ in range(5)]
    assert offsets == [0, 128, 256, 384, 512]
    assert allocator.allocate(1) is None
    allocator.free(128)
    allocator.free(512)
    assert allocator.allocate(3 * ALIGN_BYTES) is None
    assert allocator.allocate(1) == 128


def test_freeing_twice_is_our_bug() -> None:
    allocator = FirstFit(1024)
    offset = allocator.allocate(10)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


def test_the_check_sees_an_overlap() -> None:
    allocator = FirstFit(1024)
    allocator.allocate(128)
    allocator._used[64] = 64
    with pytest.raises(AssertionError):
        allocator.check_integrity()
