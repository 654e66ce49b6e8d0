"""Keys of files and KV blocks: equal for equal prompts however they grew, different for all that the model would see
differently (robustness S13 to S18 and E: shared by other servers' users until somebody noticed)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from triptych.cache.block_keys import (
    MAX_PACKED_KEYS_BYTES,
    BlockChain,
    ImagePlace,
    pack_keys,
    prompt_chain,
    root_key,
    unpack_keys,
)
from triptych.cache.keys import KEY_BYTES, file_key, mm_hash

BLOCK = 4
ROOT = root_key("rev", BLOCK)
A, B = (blake3(name).digest() for name in (b"a", b"b"))
PAD = 151655  # what a placeholder's token id is; no key depends on it

Item = int | tuple[bytes, int]  # a text token, or an image with its number of placeholders
ITEMS = st.lists(
    st.one_of(st.sampled_from([0, 1, PAD, 0xFFFFFFFE]), st.tuples(st.sampled_from([A, B]), st.integers(1, 9))), max_size=12
)


def grown(items: list[Item], chain: BlockChain | None = None) -> BlockChain:
    chain = chain or BlockChain(ROOT, BLOCK)
    for item in items:
        if isinstance(item, int):
            chain.extend([item])
        else:
            chain.append_image(*item)
    return chain


def positions(items: list[Item]) -> list[object]:
    """What the model sees at each position."""
    return [
        seen
        for item in items
        for seen in ([item] if isinstance(item, int) else [(item[0], offset) for offset in range(item[1])])
    ]


def prompt(*items: Item) -> BlockChain:
    """As the router makes it: token ids with placeholders, and places."""
    token_ids: list[int] = []
    places = []
    for item in items:
        if isinstance(item, int):
            token_ids.append(item)
        else:
            places.append(ImagePlace(item[0], len(token_ids), item[1]))
            token_ids += [PAD] * item[1]
    return prompt_chain(np.array(token_ids, dtype=np.uint32), places, BLOCK, ROOT)


@given(one=ITEMS, other=ITEMS)
def test_keys_are_equal_where_all_that_comes_before_is(one: list[Item], other: list[Item]) -> None:
    pairs = itertools.zip_longest(positions(one), positions(other))
    num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    for index, (key, other_key) in enumerate(zip(grown(one).keys, grown(other).keys, strict=False)):
        assert (key == other_key) == ((index + 1) * BLOCK <= num_equal)


@given(items=ITEMS, where=st.integers(0, 12))
def test_a_chain_goes_on_where_a_message_left_it(items: list[Item], where: int) -> None:
    begun = grown(items[:where])
    resumed = BlockChain.resume(begun.packed(), begun.tail, BLOCK)
    assert resumed == begun
    assert grown(items[where:], resumed) == grown(items)
    assert resumed.num_tokens == len(positions(items))


@given(items=ITEMS)
def test_a_prompt_is_keyed_as_it_would_have_grown(items: list[Item]) -> None:
    assert prompt(*items) == grown(items)


@given(token_ids=st.lists(st.integers(0, 2**32 - 2), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_how_the_tokens_come_does_not_matter(token_ids: list[int], cuts: list[int]) -> None:
    chain = BlockChain(ROOT, BLOCK)
    for begin, end in itertools.pairwise([0, *sorted(cuts), 40]):
        chain.extend(token_ids[begin:end])
    whole = BlockChain(ROOT, BLOCK)
    whole.extend(np.array(token_ids, dtype=np.uint32))
    assert chain == whole


def test_layout_is_frozen() -> None:
    """Keys live in shared indexes longer than a process: a change of layout must come with a new tag."""
    parts = [b"triptych root_key v1", b"rev", BLOCK.to_bytes(8, "little"), b""]
    root = blake3(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
    first = blake3(root + struct.pack("<II", 7, 8) + struct.pack("<I32sII", 0xFFFFFFFF, A, 0, 2)).digest()
    second = blake3(first + struct.pack("<I32sII", 0xFFFFFFFF, A, 2, 4)).digest()
    chain = prompt(7, 8, (A, 7), 9)
    assert chain.keys == [first, second]
    assert chain.tail == struct.pack("<I32sII", 0xFFFFFFFF, A, 6, 1) + struct.pack("<I", 9)


COLLISIONS: list[tuple[str, BlockChain, BlockChain]] = [
    ("another picture", prompt(1, (A, 6), 2), prompt(1, (B, 6), 2)),
    ("pictures in another order", prompt((A, 4), (B, 4)), prompt((B, 4), (A, 4))),
    ("one picture, two adjacent ones", prompt((A, 8)), prompt((A, 4), (A, 4))),
    ("the same picture begins later", prompt(1, 1, (A, 6)), prompt(1, (A, 6), 1)),
    ("a picture, the token that stands for it", prompt((A, 4)), prompt(PAD, PAD, PAD, PAD)),
]


@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in COLLISIONS], ids=[pair[0] for pair in COLLISIONS])
def test_a_key_tells_apart(one: BlockChain, other: BlockChain) -> None:
    assert len(one.keys) == len(other.keys) > 0
    assert one.keys[-1] != other.keys[-1]


@pytest.mark.parametrize("place", [0, 1, 2, 7, 8, 31])
def test_each_byte_of_a_picture_s_hash_is_in_the_key(place: int) -> None:
    """Some cut it to 16 or 64 bits."""
    changed = bytes(byte ^ (index == place) for index, byte in enumerate(A))
    assert prompt((A, 4)).keys != prompt((changed, 4)).keys


def test_text_before_a_picture_is_shared_by_prompts_with_different_pictures() -> None:
    one, other = prompt(1, 2, 3, 4, 5, (A, 4), 6, 7, 8), prompt(1, 2, 3, 4, 5, (B, 4), 6, 7, 8)
    assert [key == other_key for key, other_key in zip(one.keys, other.keys, strict=True)] == [True, False, False]


def test_everything_that_matters_is_in_the_root() -> None:
    roots = [
        root_key("rev", 16),
        root_key("rev2", 16),
        root_key("rev", 32),
        root_key("rev", 16, b"tenant"),
        root_key("rev", 16, b"", [A]),
        root_key("rev", 16, b"", [A, B]),
        root_key("rev", 16, b"", [B, A]),
        root_key("rev", 16, A),
    ]
    assert len(set(roots)) == len(roots)


def test_tenants_share_no_block() -> None:
    token_ids = list(range(20))
    chains = [prompt_chain(token_ids, [], BLOCK, root_key("rev", BLOCK, salt)) for salt in (b"", b"one", b"two")]
    assert len({key for chain in chains for key in chain.keys}) == 15


@pytest.mark.parametrize("places", [[(0, 3), (2, 3)], [(4, 3), (0, 2)], [(8, 3)], [(11, 1)]], ids=str)
def test_pictures_that_overlap_or_stand_outside_are_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlap"):
        prompt_chain([PAD] * 10, [ImagePlace(A, *place) for place in places], BLOCK, ROOT)


REFUSED: dict[str, Callable[[], object]] = {
    "the marker as a token id": lambda: grown([0xFFFFFFFF]),
    "a short mm_hash": lambda: grown([(A[:16], 4)]),
    "no root": lambda: BlockChain.resume(b"", b"", BLOCK),
    "half a key": lambda: BlockChain.resume(ROOT + A[:16], b"", BLOCK),
    "half a token": lambda: BlockChain.resume(ROOT, b"\1\0", BLOCK),
    "half a picture": lambda: BlockChain.resume(ROOT, grown([(A, 3)]).tail[:20], BLOCK),
    "a full block that is unfinished": lambda: BlockChain.resume(ROOT, bytes(4 * BLOCK), BLOCK),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_refused(refused: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        refused()


@pytest.mark.parametrize(("num_blocks", "fits"), [(1023, True), (1024, False)])
def test_keys_that_are_too_many_for_a_message(num_blocks: int, fits: bool) -> None:
    chain = prompt_chain(np.zeros(num_blocks * BLOCK, dtype=np.uint32), [], BLOCK, ROOT)
    packed = chain.packed()
    assert len(packed) == (MAX_PACKED_KEYS_BYTES if fits else 0)
    assert unpack_keys(packed) == ([ROOT, *chain.keys] if fits else [])
    assert unpack_keys(pack_keys(chain.keys)) == chain.keys


def _file_key(
    content: bytes | memoryview = b"file", revision: str = "rev", options: bytes = b"options", salt: bytes = b"salt"
) -> bytes:
    return file_key(content, model_revision=revision, options_key=options, cache_salt=salt)


def test_everything_that_matters_is_in_a_file_key() -> None:
    text = "abcd"
    cuts = [(text[:i], text[i:j], text[j:]) for i, j in itertools.combinations_with_replacement(range(5), 2)]
    keys = {_file_key(a.encode(), b, c.encode()) for a, b, c in cuts} | {_file_key(salt=b""), _file_key(), _file_key(b"other")}
    assert len(keys) == len(cuts) + 3
    assert {len(key) for key in keys} == {KEY_BYTES} == {32}
    assert _file_key(memoryview(b"file")) == _file_key()


def test_a_file_is_no_picture() -> None:
    pixels = bytes(12)
    picture = mm_hash([pixels], (2, 2), model_revision="rev", options_key=b"options")
    assert _file_key((2).to_bytes(8, "little") * 2 + pixels, salt=b"") != picture


def test_file_key_layout_is_frozen() -> None:
    parts = [b"triptych file_key v1", b"triptych mm_hash v1", b"rev", b"options", b"salt"]
    laid_out = b"".join(len(part).to_bytes(8, "little") + part for part in parts) + b"file"
    assert _file_key() == blake3(laid_out).digest()
