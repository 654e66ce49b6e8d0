"""The KV blocks of one instance as its roles share them: given to sequences, leased to peers, taken over again.

Wraps BlockPool (the counts) and Transport (the leases), so that each block has one owner at any time and waiting roles
hear when blocks are free again. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.shared.engine.api import Engine, Sequence
from triptych.shared.errors import InstanceLost
from triptych.shared.messages import KvRef, TensorId
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.transport.api import Transport

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


@dataclass(slots=True, eq=False)
class _Lease:
    block_ids: list[int]
    is_held: bool = True
    tensor_id: TensorId | None = None


class KvBlocks:
    """See the module's docstring. num_claimed: free blocks that decode work is about to need; new prompts leave them."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self._pool = engine.block_pool
        self._leases: dict[TensorId, _Lease] = {}
        self._on_freed: list[Callable[[], None]] = []
        self.num_claimed = 0

    @property
    def num_total(self) -> int:
        return self._pool.num_blocks

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return num_blocks_for(num_tokens, self._engine.block_size)

    def on_freed(self, callback: Callable[[], None]) -> None:
        """callback runs whenever blocks were given back, until `forget`."""
        self._on_freed.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """The role that waited for blocks has stopped."""
        self._on_freed.remove(callback)

    def allocate(self, num_blocks: int, keep_free: int = 0) -> list[int] | None:
        """num_blocks free blocks, or None when that would leave fewer than keep_free."""
        if num_blocks + keep_free > self._pool.num_free:
            return None
        return self._pool.allocate(num_blocks)

    def claim(self, num_blocks: int) -> None:
        """Set num_claimed. Called by the decode role, obeyed by prefill on the same instance."""
        has_shrunk, self.num_claimed = num_blocks < self.num_claimed, num_blocks
        if has_shrunk:
            self._tell_freed()

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back. Idempotent."""
        block_ids, sequence.block_table = sequence.block_table, []
        if block_ids:
            self._pool.free(block_ids)
            self._tell_freed()

    async def lease(self, sequence: Sequence, lease_s: float) -> KvRef:
        """Turn a prefilled sequence's blocks into a lease, for a decode instance to pull. The sequence has none after."""
        block_ids, sequence.block_table = sequence.block_table, []
        self._pool.move(block_ids, "use", "lease")
        lease = _Lease(block_ids)
        shape, dtype = self._engine.exported_shape(len(block_ids))

        def materialize(out: torch.Tensor) -> None:
            self._engine.export_blocks(block_ids, out)

        try:
            tensor = await self._transport.put_lazy(
                shape, dtype, sequence.request_id, lease_s, materialize, lambda: self._end(lease)
            )
        except BaseException:  # also cancellation: nobody will ever hold a reference to the lease
            self._end(lease)
            raise
        if lease.is_held:
            lease.tensor_id = tensor.tensor_id
            self._leases[tensor.tensor_id] = lease
        return KvRef(
            tensor=tensor,
            num_computed_tokens=sequence.num_computed_tokens,
            block_size=self._engine.block_size,
            position_delta=sequence.position_delta,
            layout=self._engine.kv_layout,
        )

    def take_over(self, kv: KvRef) -> list[int]:
        """The blocks of a lease of our own, now in use by a sequence: prefill and decode on one instance copy nothing.

        Raises:
            InstanceLost: the lease has ended.
        """
        lease = self._leases.pop(kv.tensor.tensor_id, None)
        if lease is None or not lease.is_held:
            raise InstanceLost("the prompt's KV blocks are no longer held", instance_id=kv.tensor.owner, code="tensor_gone")
        lease.is_held = False
        self._pool.move(lease.block_ids, "lease", "use")
        self._transport.release(kv.tensor.tensor_id)
        return lease.block_ids

    def _end(self, lease: _Lease) -> None:
        if lease.is_held:
            lease.is_held = False
            if lease.tensor_id is not None:
                self._leases.pop(lease.tensor_id, None)
            self._pool.free(lease.block_ids, "lease")
            self._tell_freed()

    def _tell_freed(self) -> None:
        for callback in tuple(self._on_freed):
            callback()
