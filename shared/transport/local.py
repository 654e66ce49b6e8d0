"""A pull from ourselves: out of our own store, over no channel."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import torch

from triptych.shared.messages import PullRequest
from triptych.shared.transport.layout import copy_into
from triptych.shared.transport.lease import PullKey
from triptych.shared.transport.memory import INLINE_COPY_BYTES
from triptych.shared.transport.store import TensorStore


async def pull_local(
    store: TensorStore, message: PullRequest, destination: torch.Tensor, copies: Executor, release: bool
) -> torch.Tensor:
    """Copy one of our own tensors into destination. Raises what `TensorStore.begin_pull` raises."""
    lease = await store.begin_pull(message)
    try:
        source = store.tensor(lease)
        if lease.num_bytes <= INLINE_COPY_BYTES:
            copy_into(destination, source)
        else:
            await asyncio.get_running_loop().run_in_executor(copies, copy_into, destination, source)
        if release:
            store.release(message.tensor_id)
    finally:
        store.end_pull(message.tensor_id, PullKey(message.puller, message.transfer_id))
    return destination
