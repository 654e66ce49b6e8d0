"""The KV blocks of one instance as its roles share them: given to sequences, leased to peers, taken over again.

Wraps BlockPool (the counts) and Transport (the leases), so that each hold of a block has one owner at any time and waiting
roles hear when blocks are free again. Blocks that are only cached are as good as free: they are evicted when others are
wanted. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.shared.engine.api import Engine, Sequence
from triptych.shared.errors import InstanceLost
from triptych.shared.messages import KvRef, RequestId, TensorId, TensorRef
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.transport.api import Transport

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


@dataclass(slots=True, eq=False)
class _Lease:
    """block_ids: all that are held."""

    block_ids: list[int]
    is_held: bool = True
    tensor_id: TensorId | None = None


class KvBlocks:
    """See the module's docstring. num_claimed: free blocks that decode work is about to need; new prompts leave them. pool:
    the counts."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self._engine = engine
        self._transport = transport
        self.pool = engine.block_pool
        self._leases: dict[TensorId, _Lease] = {}
        self._on_freed: list[Callable[[], None]] = []
        self._evict: Callable[[int], None] = lambda num_blocks: None
        self.num_claimed = 0

    @property
    def num_total(self) -> int:
        return self.pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free, or only cached."""
        return self.pool.num_free + self.pool.num_cached

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return num_blocks_for(num_tokens, self._engine.block_size)

    def on_freed(self, callback: Callable[[], None]) -> None:
        """callback runs whenever blocks were given back, until `forget`."""
        self._on_freed.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """The role that waited for blocks has stopped."""
        self._on_freed.remove(callback)

    def evict_with(self, evict: Callable[[int], None]) -> None:
        """evict(n) makes n blocks free that are only cached, of which there are as many."""
        self._evict = evict

    def allocate(self, num_blocks: int, keep_free: int = 0) -> list[int] | None:
        """num_blocks blocks, or None when that would leave fewer than keep_free to be had."""
        if num_blocks + keep_free > self.num_available:
            return None
        if num_blocks > self.pool.num_free:
            self._evict(num_blocks - self.pool.num_free)
        return self.pool.allocate(num_blocks)

    def claim(self, num_blocks: int) -> None:
        """Set num_claimed. Called by the decode role, obeyed by prefill on the same instance, which is told: it may get blocks
        now, or have to give some back that it does nothing with."""
        if num_blocks != self.num_claimed:
            self.num_claimed = num_blocks
            self._tell_freed()

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back. Idempotent."""
        block_ids, sequence.block_table = sequence.block_table, []
        if block_ids:
            self.pool.free(block_ids)
            self._tell_freed()

    def exchange(self, sequence: Sequence, block_ids: dict[int, int]) -> None:
        """Go on with these blocks, which others hold, in place of the sequence's own, by place in its table."""
        if block_ids:
            own = [sequence.block_table[place] for place in block_ids]
            self.pool.add_ref(block_ids.values())
            for place, block_id in block_ids.items():
                sequence.block_table[place] = block_id
            self.pool.free(own)
            self._tell_freed()

    async def lease(self, sequence: Sequence, lease_s: float, block_keys: bytes = b"", key_tail: bytes = b"") -> KvRef:
        """Turn a sequence's blocks into a lease, for a decode instance to pull; of the last ones, those that are not begun are
        given back. The sequence has none after. block_keys, key_tail: see KvRef."""
        num_blocks = self.num_for(sequence.num_computed_tokens)
        block_ids, spare = sequence.block_table[:num_blocks], sequence.block_table[num_blocks:]
        sequence.block_table = []
        self.pool.move(block_ids, "use", "lease")
        if spare:
            self.pool.free(spare)
            self._tell_freed()
        tensor = await self._lease(block_ids, block_ids, sequence.request_id, lease_s)
        return self._ref(tensor, sequence, block_keys, key_tail)

    async def lease_copy(
        self, blocks: torch.Tensor, sequence: Sequence, lease_s: float, block_keys: bytes = b"", key_tail: bytes = b""
    ) -> KvRef:
        """The same of KV that lies outside of the pool, as export_blocks made it."""
        lease = _Lease([])
        request_id = sequence.request_id
        tensor = await self._transport.put_kept(blocks, request_id, lease_s, lambda: self._end(lease))
        self._hold(lease, tensor)
        return self._ref(tensor, sequence, block_keys, key_tail)

    def is_leased(self, tensor_id: TensorId) -> bool:
        """Whether `lease` or `lease_copy` gave it, and it was neither pulled nor released yet."""
        return tensor_id in self._leases

    def has_blocks_of(self, kv: KvRef) -> bool:
        """Whether they can be taken over."""
        lease = self._leases.get(kv.tensor.tensor_id)
        return lease is None or bool(lease.block_ids)

    def _ref(self, tensor: TensorRef, sequence: Sequence, block_keys: bytes, key_tail: bytes) -> KvRef:
        return KvRef(
            tensor=tensor,
            num_computed_tokens=sequence.num_computed_tokens,
            block_size=self._engine.block_size,
            position_delta=sequence.position_delta,
            layout=self._engine.kv_layout,
            block_keys=block_keys,
            key_tail=key_tail,
        )

    async def lease_prefix(self, block_ids: list[int], first: int, request_id: RequestId, lease_s: float) -> TensorRef:
        """Lease cached blocks, from `first` on, to a peer with a prompt that begins as they do. Those before are held, too:
        the prefix cache can only evict a block after what follows it."""
        self.pool.add_ref(block_ids, "lease")
        return await self._lease(block_ids, block_ids[first:], request_id, lease_s)

    async def _lease(self, held: list[int], exported: list[int], request_id: RequestId, lease_s: float) -> TensorRef:
        """exported: those of the held ones that are pulled."""
        lease = _Lease(held)
        shape, dtype = self._engine.exported_shape(len(exported))

        def materialize(out: torch.Tensor) -> None:
            self._engine.export_blocks(exported, out)

        try:
            tensor = await self._transport.put_lazy(shape, dtype, request_id, lease_s, materialize, lambda: self._end(lease))
        except BaseException:  # also cancellation: nobody will ever hold a reference to the lease
            self._end(lease)
            raise
        self._hold(lease, tensor)
        return tensor

    def _hold(self, lease: _Lease, tensor: TensorRef) -> None:
        if lease.is_held:
            lease.tensor_id = tensor.tensor_id
            self._leases[tensor.tensor_id] = lease

    def take_over(self, kv: KvRef) -> list[int]:
        """The blocks of a lease of our own, now in use by a sequence: prefill and decode on one instance copy nothing.

        Raises:
            InstanceLost: the lease has ended.
        """
        lease = self._leases.pop(kv.tensor.tensor_id, None)
        if lease is None or not lease.is_held:
            raise InstanceLost("the prompt's KV blocks are no longer held", instance_id=kv.tensor.owner, code="tensor_gone")
        lease.is_held = False
        self.pool.move(lease.block_ids, "lease", "use")
        self._transport.release(kv.tensor.tensor_id)
        return lease.block_ids

    def _end(self, lease: _Lease) -> None:
        if lease.is_held:
            lease.is_held = False
            if lease.tensor_id is not None:
                self._leases.pop(lease.tensor_id, None)
            self.pool.free(lease.block_ids, "lease")
            self._tell_freed()

    def _tell_freed(self) -> None:
        for callback in tuple(self._on_freed):
            callback()
