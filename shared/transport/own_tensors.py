"""What every transport has in common: the tensors that this instance leases to others, in a TensorStore, and their sweeping.
No torch: emulated instances have one, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from triptych.shared.messages import RequestId, TensorId, TensorRef
from triptych.shared.transport.store import TensorStore

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    from collections.abc import Callable

    import torch

MAX_PULLS_UNDER_WAY = 512  # chosen: all images of the requests that one instance works on
SWEEP_INTERVAL_S = 0.25  # chosen: how late an expired lease may end

log = logging.getLogger(__name__)


class OwnTensors:
    """The half of `Transport` that needs no peer."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    async def put(self, tensor: torch.Tensor, request_id: RequestId, lease_s: float) -> TensorRef:
        return await self._store.put(tensor, request_id, lease_s)

    async def put_lazy(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        request_id: RequestId,
        lease_s: float,
        materialize: Callable[[torch.Tensor], None],
        on_release: Callable[[], None],
    ) -> TensorRef:
        return await self._store.put_lazy(shape, dtype, request_id, lease_s, materialize, on_release)

    async def put_kept(
        self, tensor: torch.Tensor, request_id: RequestId, lease_s: float, on_release: Callable[[], None]
    ) -> TensorRef:
        return await self._store.put_kept(tensor, request_id, lease_s, on_release)

    def get(self, ref: TensorRef) -> torch.Tensor:
        return self._store.get(ref.tensor_id)

    def release(self, tensor_id: TensorId) -> None:
        self._store.release(tensor_id)

    def release_request(self, request_id: RequestId) -> None:
        self._store.release_request(request_id)

    def usage(self) -> tuple[int, int, int]:
        return self._store.usage()

    def check_integrity(self) -> None:
        """Raises AssertionError when the store's books don't balance."""
        self._store.check_integrity()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self._sweep(time.monotonic())
            except Exception:
                log.exception("a sweep of the tensor store failed")  # the next one may not, and must come

    async def _sweep(self, now_s: float) -> None:
        """End the pulls and leases whose time is over."""
        raise NotImplementedError
