"""The one form that all costs have, whether measured on this machine or derived from published figures.

A forward pass takes  fixed + many * (1 - 1/T) + sequence * S + token * hypot(knee, T) + pair * P + context * C  seconds: linear
layers read their weights until T reaches the knee, where compute takes over (a smooth maximum of both); attention comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

NotNegative = Annotated[float, msgspec.Meta(ge=0)]  # checked where costs are read from a file, as the bounds below are
_Bytes = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class PassWork:
    """What one forward pass has to do. num_sequences: sequences, or images for an encoder. num_pairs: (query, key) pairs of
    attention. num_context_tokens: tokens whose KV is read, new ones included. Floats, because tokens may count in part."""

    num_tokens: NotNegative
    num_sequences: NotNegative = 0.0
    num_pairs: NotNegative = 0.0
    num_context_tokens: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Coefficients of one stage, seconds each, none negative; knee_tokens: tokens at which reading weights and computing
    take equally long, the memory-to-compute tipping point. A token costs token_s once the pass is far beyond the knee. many_s:
    what products of a matrix with many tokens cost over that with one, on a CPU as much as reading the weights once more
    (measured: two rows take MKL twice the time of one, eight hardly more than four)."""

    fixed_s: NotNegative
    token_s: NotNegative
    knee_tokens: NotNegative = 0.0
    sequence_s: NotNegative = 0.0
    pair_s: NotNegative = 0.0
    context_s: NotNegative = 0.0
    many_s: NotNegative = 0.0

    def pass_s(self, work: PassWork) -> float:
        """Seconds of one pass; of nothing to do, 0."""
        if not work.num_tokens:
            return 0.0
        return (
            self.fixed_s
            + self.many_s * beyond_one(work.num_tokens)
            + self.sequence_s * work.num_sequences
            + self.token_s * math.hypot(self.knee_tokens, work.num_tokens)
            + self.pair_s * work.num_pairs
            + self.context_s * work.num_context_tokens
        )


def beyond_one(num_tokens: float) -> float:
    """0 for one token, towards 1 for many."""
    return max(1.0 - 1.0 / num_tokens, 0.0)


@dataclass(frozen=True, slots=True)
class PreprocessCosts:
    """Decoding and resizing one picture on one CPU core, by the pixels of the picture as it was sent."""

    fixed_s: float
    pixel_s: float


@dataclass(frozen=True, slots=True)
class MemoryCosts:
    """Bytes of one instance. kv_bytes_per_image_token: of an image token that only cross-attention sees (CroAttn), and 0
    where image tokens are tokens like others. kv_capacity_bytes: room for KV beside the weights."""

    weight_bytes: _Bytes
    kv_bytes_per_token: Annotated[int, msgspec.Meta(gt=0)]
    kv_bytes_per_image_token: _Bytes
    embedding_bytes_per_token: _Bytes
    kv_capacity_bytes: _Bytes
