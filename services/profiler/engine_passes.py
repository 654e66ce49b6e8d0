"""Makes an engine do one pass of each stage, as the roles do, and says how long it took.

The KV of a context is never computed: its blocks hold whatever they held, which takes as long to attend to.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from triptych.services.profiler.grid import ImageBatch
from triptych.shared.checkpoint import Checkpoint, image_info
from triptych.shared.cost_model.api import DecodeBatch, PrefillChunk
from triptych.shared.engine.api import Chunk, Engine, Sequence
from triptych.shared.image_info import ImageInfo
from triptych.shared.messages import RequestId
from triptych.shared.policies.batching import num_blocks_for
from triptych.shared.sampling_params import SamplingParams

_GREEDY = SamplingParams(max_tokens=1)


class EnginePasses:
    """Each method makes its inputs, runs one pass, frees what it took, and returns the seconds of the pass alone."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, is_cuda: bool, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._image = checkpoint.image
        self._text_token_id = 1 if checkpoint.image_token_id == 0 else 0
        self._is_cuda = is_cuda
        self._clock = clock

    def embedding_bytes_per_token(self, batch: ImageBatch) -> int:
        """Of what the engine makes of such pictures."""
        embedding = self._engine.encode(*self._pictures(batch))[0]
        return embedding[0].numel() * embedding.itemsize

    def encode(self, batch: ImageBatch) -> float:
        images, pixels = self._pictures(batch)
        began_s = self._now_s()
        self._engine.encode(images, pixels)
        return self._now_s() - began_s

    def prefill(self, chunks: Seq[PrefillChunk]) -> float:
        return self._run([(chunk.num_tokens, chunk.num_context_tokens) for chunk in chunks])

    def decode(self, batch: DecodeBatch) -> float:
        return self._run([(1, batch.num_context_tokens // batch.num_sequences)] * batch.num_sequences)

    def move_kv(self, num_blocks: int) -> float:
        """As instances on one machine do: copied out of the blocks, from one process to the other, and into its blocks."""
        pool = self._engine.block_pool
        source = pool.allocate(num_blocks)
        try:
            target = pool.allocate(num_blocks)
            try:
                began_s = self._now_s()
                self._engine.import_blocks(self._engine.export_blocks(source).clone(), target)
                return self._now_s() - began_s
            finally:
                pool.free(target)
        finally:
            pool.free(source)

    def _pictures(self, batch: ImageBatch) -> tuple[list[ImageInfo], list[torch.Tensor]]:
        info = image_info(batch.height, batch.width, self._image, b"profile")
        size = (batch.height, batch.width, 3)
        return [info] * batch.num_images, [torch.randint(0, 256, size, dtype=torch.uint8) for _ in range(batch.num_images)]

    def _run(self, sizes: Seq[tuple[int, int]]) -> float:
        """sizes: tokens to compute and tokens before them, of each sequence. All finish their prompts: they give a token."""
        chunks: list[Chunk] = []
        try:
            for num_tokens, num_context in sizes:
                chunks.append(Chunk(self._sequence(num_context + num_tokens, num_context), num_tokens))
            began_s = self._now_s()
            self._engine.run(chunks)
            return self._now_s() - began_s
        finally:
            for chunk in chunks:
                self._engine.block_pool.free(chunk.sequence.block_table)

    def _sequence(self, num_tokens: int, num_computed_tokens: int) -> Sequence:
        sequence = Sequence(RequestId("profile"), [self._text_token_id] * num_tokens, num_tokens, _GREEDY)
        self._engine.prepare(sequence)
        sequence.num_computed_tokens = num_computed_tokens
        sequence.block_table = self._engine.block_pool.allocate(num_blocks_for(num_tokens, self._engine.block_size))
        return sequence

    def _now_s(self) -> float:
        """After all that was asked of the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return self._clock()
