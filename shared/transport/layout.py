"""How a tensor lies in bytes: dtype names on the wire, sizes, views of raw bytes, plain copies. No I/O."""

from __future__ import annotations

import math

import numpy as np
import torch

from triptych.shared.errors import InternalError
from triptych.shared.messages import TensorRef

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    )
}
MAX_TENSOR_BYTES = 8 << 30  # chosen: far above any tensor of ours; a bound for what a message can make us allocate


def dtype_name(dtype: torch.dtype) -> str:
    """Name on the wire.

    Raises:
        InternalError: not a dtype that travels.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InternalError(f"dtype {name} cannot be transferred", code="tensor_mismatch")
    return name


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    if any(size < 0 for size in shape):
        raise InternalError("a tensor's shape has a negative size", code="tensor_mismatch")
    return math.prod(shape) * dtype.itemsize


def checked_dtype(ref: TensorRef) -> torch.dtype:
    """The dtype of a reference, after checking that its shape, dtype and num_bytes agree.

    Raises:
        InternalError: they don't, or it is larger than any tensor of ours.
    """
    dtype = DTYPES.get(ref.dtype)
    if dtype is None or num_bytes_of(ref.shape, dtype) != ref.num_bytes or ref.num_bytes > MAX_TENSOR_BYTES:
        raise InternalError("a tensor reference contradicts itself", code="tensor_mismatch")
    return dtype


def shaped(raw: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of 1-D uint8 `raw` as shape and dtype."""
    return raw.view(dtype).view(shape)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a 1-D uint8 view."""
    return tensor.reshape(-1).view(torch.uint8)


def copy_into(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy source into a contiguous destination of equal shape and dtype.

    numpy's copy is one memcpy without the GIL; torch's would start an OpenMP team in every thread that calls it.
    """
    if source.numel() == 0:
        return
    if source.is_contiguous() and source.device.type == destination.device.type == "cpu":
        np.copyto(raw_bytes(destination).numpy(), raw_bytes(source.detach()).numpy())
    else:
        destination.copy_(source.detach())
