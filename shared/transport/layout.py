"""How a torch tensor lies in bytes: dtypes by name, views of raw bytes, plain copies. No I/O."""

from __future__ import annotations

import numpy as np
import torch

from triptych.shared.errors import InternalError
from triptych.shared.messages import TensorRef
from triptych.shared.transport.memory import DTYPE_NAMES, num_bytes_of

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in sorted(DTYPE_NAMES)}
MAX_TENSOR_BYTES = 8 << 30  # chosen: far above any tensor of ours; a bound for what a message can make us allocate


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
