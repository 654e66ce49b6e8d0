"""GPU classes: data-sheet figures, and how much of them published measurements reach.

Efficiencies of A100 and H100 are least-error fits (of the logarithm) to operator timings of microsoft/vidur (MIT). Layers of
five models (H100: three), TP 1 to 8, 1 to 16,384 tokens in powers of two: 276 points (156), median error 3.8 % (3.8 %), 95 %
under 13 % (17 %); over all numbers of tokens, which kernels suit less, 4.7 % (7.2 %), 95 % under 17 % (28 %). All-reduce in a
node: 6 % (7 %), 95 % under 30 % (31 %). Between two GPUs, from 16 MiB on: 2 %, 95 % under 18 % (7 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Gpu:
    """peak_flops: dense bf16. mfu and efficiency: shares of peak_flops and of memory_bytes_per_s. layer_s: norms, rotations
    and launches of one layer. local_bytes_per_s: between two GPUs of a node. The all-reduce of b bytes over n GPUs takes
    all_reduce_s + 2 (n - 1) / n * b / all_reduce_bytes_per_s."""

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    linear_mfu: float
    attention_mfu: float
    weights_efficiency: float
    kv_efficiency: float
    layer_s: float
    all_reduce_s: float
    all_reduce_bytes_per_s: float
    local_bytes_per_s: float


_A100 = Gpu(
    name="A100-80G",
    peak_flops=312e12,  # NVIDIA A100 data sheet, as are the two below
    memory_bytes=80 << 30,
    memory_bytes_per_s=2.039e12,
    linear_mfu=0.66,  # vidur
    attention_mfu=0.5,  # FlashAttention-2 (arXiv 2307.08691) reaches 50 to 73 %
    weights_efficiency=0.78,  # vidur
    kv_efficiency=0.65,  # DistServe's A100 profile (Apache-2.0): 0.63 us per token of OPT-13B, of 819,200 bytes each
    layer_s=40e-6,  # vidur
    all_reduce_s=48e-6,  # vidur
    all_reduce_bytes_per_s=171e9,  # vidur
    local_bytes_per_s=226e9,  # vidur's send_recv from 16 MiB on
)
_H100 = Gpu(
    name="H100-80G",
    peak_flops=989e12,  # NVIDIA H100 SXM data sheet, as are the two below
    memory_bytes=80 << 30,
    memory_bytes_per_s=3.35e12,
    linear_mfu=0.61,  # vidur
    attention_mfu=0.5,  # chosen: FlashAttention-2 reaches 35 %, FlashAttention-3 up to 75 % (arXiv 2407.08608)
    weights_efficiency=0.90,  # vidur
    kv_efficiency=0.65,  # chosen: as on A100
    layer_s=35e-6,  # vidur
    all_reduce_s=29e-6,  # vidur
    all_reduce_bytes_per_s=353e9,  # vidur
    local_bytes_per_s=342e9,  # vidur's send_recv from 16 MiB on
)
_NVLINK_SHARE = 400 / 600  # an A800 is an A100 whose NVLink carries 400 GB/s instead of 600 (NVIDIA A800 data sheet)
_A800 = replace(
    _A100,
    name="A800-80G",
    all_reduce_bytes_per_s=_A100.all_reduce_bytes_per_s * _NVLINK_SHARE,
    local_bytes_per_s=_A100.local_bytes_per_s * _NVLINK_SHARE,
)

GPUS: Mapping[str, Gpu] = MappingProxyType({"a100": _A100, "a800": _A800, "h100": _H100})
