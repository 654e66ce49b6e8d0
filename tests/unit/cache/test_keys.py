"""mm_hash: equal for equal pictures, different for everything that the model would see differently (robustness S13, S14)."""

from __future__ import annotations

import itertools

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from triptych.cache.keys import MM_HASH_BYTES, mm_hash

OPTIONS = b"patch 14"


def _hash(
    pixels: bytes, size: tuple[int, int], revision: str = "rev", options_key: bytes = OPTIONS, tenant_salt: bytes = b""
) -> bytes:
    return mm_hash([pixels], size, model_revision=revision, options_key=options_key, tenant_salt=tenant_salt)


def test_transposed_sizes_of_equal_bytes_differ() -> None:
    pixels = bytes(range(250)) * 36
    sizes = [(30, 100), (100, 30), (1, 3000), (3000, 1), (10, 300)]
    assert len({_hash(pixels, size) for size in sizes}) == len(sizes)


def test_everything_that_matters_is_in_it() -> None:
    pixels = bytes(12)
    variants = [
        _hash(pixels, (2, 2)),
        _hash(bytes(11) + b"\1", (2, 2)),
        _hash(pixels, (2, 2), revision="rev2"),
        _hash(pixels, (2, 2), options_key=b"patch 16"),
        _hash(pixels, (2, 2), tenant_salt=b"tenant"),
    ]
    assert len(set(variants)) == len(variants)
    assert {len(variant) for variant in variants} == {MM_HASH_BYTES} == {32}


def test_parts_cannot_run_into_each_other() -> None:
    """The same bytes, cut elsewhere between revision, options and salt, are another key."""
    text = "abcd"
    cuts = [(text[:i], text[i:j], text[j:]) for i, j in itertools.combinations_with_replacement(range(5), 2)]
    keys = {_hash(bytes(3), (1, 1), revision=a, options_key=b.encode(), tenant_salt=c.encode()) for a, b, c in cuts}
    assert len(keys) == len(cuts) == 15


@given(pixels=st.binary(min_size=12, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_how_the_pixels_are_cut_does_not_matter(pixels: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 12]
    parts = [pixels[begin:end] for begin, end in itertools.pairwise(edges)]
    whole = _hash(pixels, (2, 2))
    assert mm_hash(parts, (2, 2), model_revision="rev", options_key=OPTIONS) == whole


@pytest.mark.parametrize("num_bytes", [0, 11, 13, 24])
def test_wrong_number_of_pixels_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="RGB picture"):
        _hash(bytes(num_bytes), (2, 2))


def test_layout_is_frozen() -> None:
    """Keys live in shared indexes longer than a process: a change of layout must come with a new tag."""
    parts = [b"triptych mm_hash v1", b"rev", OPTIONS, b"salt"]
    laid_out = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    laid_out += (1).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"pixels"
    assert _hash(b"pixels", (1, 2), tenant_salt=b"salt") == blake3(laid_out).digest()
