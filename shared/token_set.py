"""Which tokens a prompt has, as bits: what a repetition penalty needs of it. Made by the router, read by the sampler."""

from __future__ import annotations

from collections.abc import Iterable


def token_set(token_ids: Iterable[int]) -> bytes:
    """The bit of token t is 1 << (t % 8) in byte t // 8: 19 KB for a vocabulary of 152,000, however long the prompt."""
    distinct = set(token_ids)
    bits = bytearray(max(distinct, default=-1) // 8 + 1)
    for token_id in distinct:
        bits[token_id // 8] |= 1 << (token_id % 8)
    return bytes(bits)


def token_ids_of(bits: bytes) -> list[int]:
    """The inverse: each token once, ascending."""
    return [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]
