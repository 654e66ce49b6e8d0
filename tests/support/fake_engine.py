"""An engine that needs no model: its next token is a digest of the KV that its block table leads to.

A sequence whose blocks were mixed up, lost a token in a preemption, or moved with the wrong rotary delta gives other
tokens than `expected_tokens`, and slots that are not in order raise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from blake3 import blake3

from triptych.shared.engine.api import Chunk, Sequence
from triptych.shared.engine.paged_kv import BlockPool
from triptych.shared.errors import InternalError
from triptych.shared.image_info import ImageInfo
from triptych.shared.instance_info import ModelCard

BLOCK_SIZE = 4
EMBEDDING_SIZE = 2
FIRST_TOKEN = 1000  # generated tokens are in [1000, 2000)
DELTA_PER_IMAGE = 7
GATE_TIMEOUT_S = 5.0


def expected_tokens(slots: list[int], num_images: int, count: int) -> list[int]:
    """Output of a prompt whose KV slots hold `slots` (token ids, at placeholders embedding values)."""
    slots, output = list(slots), []
    for _ in range(count):
        output.append(_digest(slots, DELTA_PER_IMAGE * num_images))
        slots.append(output[-1])
    return output


def embedding_of(pixels: torch.Tensor) -> int:
    """What every token of an image becomes in the KV."""
    return 5000 + int(pixels.to(torch.int64).sum()) % 4000


class FakeEngine:
    """Implements Engine. poison: a token id in a chunk, or a pixel value in an image, that raises. gate: each call waits
    until it is set. steps and encodes tell what the calls held."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 10_000, layout: str = "fake") -> None:
        self.model_card = ModelCard("fake", "r1", max_model_len)
        self.block_pool = BlockPool(num_blocks)
        self.block_size = BLOCK_SIZE
        self.embedding_bytes = EMBEDDING_SIZE * 4  # float32
        self.attends_to_all = False
        self.kv_layout = layout
        self.poison: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()
        self.steps: list[list[tuple[str, int]]] = []
        self.encodes: list[int] = []
        self.num_exports = 0
        self.step_time_s = 0.0
        self._kv = torch.full((1, 2, num_blocks, BLOCK_SIZE, 1, 1), -1, dtype=torch.int64)
        self._thread: int | None = None

    def encode(self, images: Seq[ImageInfo], pixels: Seq[torch.Tensor]) -> list[torch.Tensor]:
        self._enter()
        self.encodes.append(len(images))
        if any(int(one[0, 0, 0]) in self.poison for one in pixels):
            raise RuntimeError("poison image")
        return [
            torch.full((image.num_tokens, EMBEDDING_SIZE), float(embedding_of(one)))
            for image, one in zip(images, pixels, strict=True)
        ]

    def prepare(self, sequence: Sequence) -> None:
        sequence.positions = torch.arange(sequence.num_prompt_tokens).expand(3, -1)
        sequence.position_delta = DELTA_PER_IMAGE * sum(not span.image.first_piece for span in sequence.images)

    def run(self, chunks: Seq[Chunk]) -> list[int | None]:
        self._enter()
        self.steps.append([(chunk.sequence.request_id, chunk.num_tokens) for chunk in chunks])
        for chunk in chunks:
            sequence = chunk.sequence
            end = sequence.num_computed_tokens + chunk.num_tokens
            self._write(sequence, sequence.num_computed_tokens, end)
            if self.poison & set(sequence.token_ids[sequence.num_computed_tokens : end]):
                raise RuntimeError("poison token")
            sequence.num_computed_tokens = end
        return [self._next(chunk.sequence) for chunk in chunks]

    def export_blocks(self, block_ids: Seq[int], out: torch.Tensor | None = None) -> torch.Tensor:
        self.num_exports += 1
        copied = self._kv[:, :, list(block_ids)].contiguous()
        return copied if out is None else out.copy_(copied)

    def import_blocks(self, blocks: torch.Tensor, block_ids: Seq[int]) -> None:
        assert tuple(blocks.shape) == self.exported_shape(len(block_ids))[0]
        self._kv[:, :, list(block_ids)] = blocks

    def exported_shape(self, num_blocks: int) -> tuple[tuple[int, ...], torch.dtype]:
        return (1, 2, num_blocks, BLOCK_SIZE, 1, 1), torch.int64

    def _enter(self) -> None:
        """Always on one thread, never on the event loop's."""
        self.is_inside.set()
        assert self.gate.wait(GATE_TIMEOUT_S), "the test never opened the gate"
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident() != threading.main_thread().ident
        time.sleep(self.step_time_s)

    def _write(self, sequence: Sequence, begin: int, end: int) -> None:
        for i in range(begin, end):
            block = sequence.block_table[i // BLOCK_SIZE]
            self._kv[0, 0, block, i % BLOCK_SIZE] = _slot(sequence, i)
            self._kv[0, 1, block, i % BLOCK_SIZE] = i

    def _next(self, sequence: Sequence) -> int | None:
        if sequence.num_computed_tokens < len(sequence.token_ids):
            return None
        kv = self._kv[0, :, sequence.block_table].reshape(2, -1)[:, : len(sequence.token_ids)]
        if kv[1].tolist() != list(range(len(sequence.token_ids))):
            raise InternalError(f"the KV slots of {sequence.request_id} are {kv[1].tolist()}")
        return _digest(kv[0].tolist(), sequence.position_delta)


def _slot(sequence: Sequence, i: int) -> int:
    for span in sequence.images:
        if span.offset <= i < span.offset + span.image.num_tokens:
            assert span.embeddings is not None, "an image is computed before it is there"
            return int(span.embeddings[i - span.offset, 0])
    return sequence.token_ids[i]


def _digest(slots: list[int], delta: int) -> int:
    text: Any = ",".join(map(str, [*slots, delta])).encode()
    return FIRST_TOKEN + int.from_bytes(blake3(text).digest(4), "little") % 1000
