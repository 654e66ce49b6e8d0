"""KV of preempted sequences in host memory. A block that several of them share is there once. Used by batch.py."""

from __future__ import annotations

import math
from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from triptych.services.decode.job import DecodeJob
from triptych.services.host_context import HostContext
from triptych.shared.errors import Overloaded

if TYPE_CHECKING:  # only named, never computed with: emulated instances run without torch
    import torch


class PreemptedKv:
    """max_bytes: what it can get to at most, so that no request ends for a lack of it. Ours.

    Of n sequences that grow side by side in a pool of size P, the youngest is preempted when each has P/n, the next at
    P/(n-1), ... the second at P/2; what did not grow was in the pool at first, together at most P, however often it is shared.
    That is P * (1 + 1/2 + ... + 1/n), 4.7 P for 64, and a block each for rounding. Nothing new comes into the pool meanwhile
    (`DecodeBatch._join` and `_claim`).
    """

    def __init__(self, context: HostContext) -> None:
        self._context = context
        num_seqs = context.settings.max_num_seqs
        num_blocks = math.ceil(context.kv.num_total * sum(1 / n for n in range(1, num_seqs + 1))) + num_seqs
        self.max_bytes = self._num_bytes(num_blocks)

    async def copy(self, job: DecodeJob, preempted: Seq[DecodeJob]) -> None:
        """Copy a job's KV out of its blocks, which it still has afterwards. preempted: the others.

        Raises:
            Overloaded: there is no memory left for it.
        """
        kv, sequence = self._context.kv, job.sequence
        block_ids = sequence.block_table[: kv.num_for(sequence.num_computed_tokens)]
        held = {key: block for one in preempted for key, block in one.shared.items()}
        places = {key: block_ids[place] for place, key in enumerate(self._shared_keys(job, block_ids, held))}
        num_new = len(block_ids) - sum(key in held for key in places)
        if held_bytes_of(preempted) + self._num_bytes(num_new) > self.max_bytes:
            raise Overloaded("too many requests at one decode instance", code="kv_full")

        def export() -> tuple[dict[bytes, torch.Tensor], torch.Tensor]:
            shared = {key: held[key] if key in held else self._export([block_id]) for key, block_id in places.items()}
            return shared, self._export(block_ids[len(places) :])

        job.shared, job.kv = await self._context.thread.run(export)

    def _shared_keys(self, job: DecodeJob, block_ids: Seq[int], held: Container[bytes]) -> list[bytes]:
        """Of the first blocks, which others hold, too, or are in host memory already: never the last one, so that something
        remains."""
        keys = [] if job.chain is None else job.chain.keys[: len(block_ids) - 1]
        pool, blocks = self._context.kv.pool, zip(keys, block_ids, strict=False)
        shared = [key in held or pool.num_holds(block_id) > 1 for key, block_id in blocks]
        return keys[: shared.index(False) if False in shared else len(shared)]

    def _export(self, block_ids: Seq[int]) -> torch.Tensor:
        engine = self._context.engine
        return engine.export_blocks(block_ids, self._context.host_memory(*engine.exported_shape(len(block_ids))))

    def _num_bytes(self, num_blocks: int) -> int:
        shape, dtype = self._context.engine.exported_shape(num_blocks)
        return dtype.itemsize * math.prod(shape)


def held_bytes_of(preempted: Seq[DecodeJob]) -> int:
    """What these have outside of the pool."""
    tensors = [tensor for job in preempted for tensor in (*job.shared.values(), job.kv) if tensor is not None]
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
