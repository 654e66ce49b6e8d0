"""Randomness of sampling: a number for each (seed, index in the output, token id), by hashing. Used by sampling.py.

There is no state: a request's draws are the same alone or in a batch, before or after a hand-off, on any instance and device.
32-bit integers: torch has no vectorised multiplication of longer ones. Shapes: R rows, K tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch

# a counter times _STEP (2**32 over the golden ratio), made random by two rounds of Wellons' lowbias32
_STEP = -0x61C88647
_MIX_1, _MIX_2 = 0x7FEB352D, -0x7B935975
_BITS = 31  # kept of 32: positive


def keys_of(draws: Sequence[tuple[int, int]]) -> torch.Tensor:
    """What the noise of each draw, a (seed, index), is made from: int32 [R, 2]. index: how many output tokens are before it."""
    digests = [blake2b(struct.pack("<QQ", seed & (2**64 - 1), index), digest_size=8).digest() for seed, index in draws]
    return torch.tensor([struct.unpack("<ii", digest) for digest in digests], dtype=torch.int32)


def gumbel(keys_R2: torch.Tensor, token_ids_RK: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [R, K]: the argmax of log probability + noise is a draw from the distribution.
    token_ids_RK: int32, [K] when all rows have the same."""
    bits = token_ids_RK * _STEP + keys_R2[:, :1]
    bits = (bits ^ _shifted(bits, 16)).mul_(_MIX_1).bitwise_xor_(keys_R2[:, 1:])
    bits = (bits ^ _shifted(bits, 15)).mul_(_MIX_2)
    bits = (bits ^ _shifted(bits, 16)).bitwise_and_((1 << _BITS) - 1)
    uniform = bits.float().add_(0.5).mul_(2.0**-_BITS).clamp_(max=1 - 2.0**-24)  # small ones are exact to 1 part in 2**24
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right: int32's own repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)
